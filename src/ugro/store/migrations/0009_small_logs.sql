-- What small commands wrote, recorded with their end. Files are made of it when somebody reads it.
CREATE TABLE small_logs (
    job     INTEGER NOT NULL REFERENCES jobs (id),
    attempt INTEGER NOT NULL,
    rank    INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (job, rank)
) WITHOUT ROWID;
