-- Jobs that are over and whose last checkpoint is still to be brought home, before the nodes forget them.
CREATE TABLE to_keep (
    job INTEGER PRIMARY KEY REFERENCES jobs (id)
);

-- A time limit counts from here; started_at stays what it was when the job was first started.
ALTER TABLE jobs ADD COLUMN attempt_started_at TEXT;
