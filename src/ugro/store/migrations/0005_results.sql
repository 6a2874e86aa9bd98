-- What a job made, what it was made with, and whether it has to be made again.
ALTER TABLE jobs ADD COLUMN results_removed_at TEXT;

-- The result cache: the same key is the same work; a job that was not run points to the one that did it.
ALTER TABLE jobs ADD COLUMN cache_key TEXT;
ALTER TABLE jobs ADD COLUMN cached_from INTEGER REFERENCES jobs (id);
CREATE INDEX jobs_by_cache_key ON jobs (cache_key) WHERE cache_key IS NOT NULL;

-- Where the submitted code came from, such as its git commit.
ALTER TABLE jobs ADD COLUMN origin TEXT;

-- What was installed on a node when an attempt started there, each content once.
CREATE TABLE environments (
    hash    TEXT PRIMARY KEY,
    content TEXT NOT NULL
);

CREATE TABLE attempt_environments (
    job     INTEGER NOT NULL REFERENCES jobs (id),
    attempt INTEGER NOT NULL,
    node    TEXT NOT NULL,
    hash    TEXT NOT NULL REFERENCES environments (hash),
    PRIMARY KEY (job, attempt, node)
);
