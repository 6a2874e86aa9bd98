-- What users have used, by hour of the wall clock: written as an attempt ends, in the same transaction, and kept when
-- jobs are removed. Seconds of GPUs; of cores of nodes on which a job has no GPU; of devices, as the queue counts them.
-- "changed" grows with every change, so that a reader finds what is new.
CREATE TABLE usage_hours (
    user_name TEXT NOT NULL,
    hour      INTEGER NOT NULL,
    gpu_s     REAL NOT NULL DEFAULT 0,
    cpu_s     REAL NOT NULL DEFAULT 0,
    device_s  REAL NOT NULL DEFAULT 0,
    jobs      INTEGER NOT NULL DEFAULT 0,
    joules    REAL NOT NULL DEFAULT 0,
    changed   INTEGER NOT NULL,
    PRIMARY KEY (user_name, hour)
);

CREATE INDEX usage_hours_changed ON usage_hours (changed);
CREATE INDEX usage_hours_hour ON usage_hours (hour);

-- How much of a job's energy is in "usage_hours" already.
CREATE TABLE job_energy (
    job    INTEGER PRIMARY KEY REFERENCES jobs (id),
    joules REAL NOT NULL
);
