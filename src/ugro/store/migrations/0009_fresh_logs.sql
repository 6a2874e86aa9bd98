-- Logs of small commands that have ended, until they are in files.
CREATE TABLE fresh_logs (
    job     INTEGER NOT NULL REFERENCES jobs (id),
    attempt INTEGER NOT NULL,
    rank    INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (job, rank)
) WITHOUT ROWID;
