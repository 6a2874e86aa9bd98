-- Who did what. Rows are added and, when they are old, removed; never changed.
CREATE TABLE audit (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    at      TEXT NOT NULL,
    user    TEXT NOT NULL,
    via     TEXT NOT NULL,
    action  TEXT NOT NULL,
    subject TEXT NOT NULL,
    outcome TEXT NOT NULL
);

CREATE INDEX audit_by_time ON audit (at);
