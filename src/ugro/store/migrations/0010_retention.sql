-- Removals that were announced: a job, or only its results, and when it is due (seconds since the epoch).
-- The row outlives the job's own until the job's folder is gone, too.
CREATE TABLE removals (
    job    INTEGER PRIMARY KEY,
    what   TEXT NOT NULL,
    due_at REAL NOT NULL
);

CREATE INDEX removals_by_due ON removals (due_at);
CREATE INDEX jobs_by_end ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX jobs_by_source ON jobs (cached_from) WHERE cached_from IS NOT NULL;
CREATE INDEX events_without_job ON events (at) WHERE job IS NULL;
