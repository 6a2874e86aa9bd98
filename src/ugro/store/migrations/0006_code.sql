-- The trees of code that were taken, by their hash, and which of each folder a node got last.
CREATE TABLE snapshots (
    id       TEXT PRIMARY KEY,
    folder   TEXT NOT NULL,
    taken_at TEXT NOT NULL
);

CREATE TABLE sent_code (
    node     TEXT NOT NULL,
    folder   TEXT NOT NULL,
    snapshot TEXT NOT NULL,
    sent_at  TEXT NOT NULL,
    PRIMARY KEY (node, folder)
);
