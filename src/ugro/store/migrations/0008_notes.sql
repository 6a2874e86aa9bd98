-- What people write about jobs. Tags are a JSON list.
CREATE TABLE notes (
    job        INTEGER PRIMARY KEY REFERENCES jobs (id),
    text       TEXT NOT NULL,
    tags       TEXT NOT NULL,
    changed_at TEXT NOT NULL
);
