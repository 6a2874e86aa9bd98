-- Jobs, their attempts, the devices they hold, and everything that happened, once and in order.
CREATE TABLE jobs (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    submit_key   TEXT NOT NULL UNIQUE,
    name         TEXT NOT NULL,
    user_name    TEXT NOT NULL,
    spec         TEXT NOT NULL,
    state        TEXT NOT NULL,
    reason       TEXT NOT NULL,
    attempt      INTEGER NOT NULL DEFAULT 0,
    placement    TEXT,
    exit_code    INTEGER,
    ending       TEXT,
    tries        TEXT NOT NULL DEFAULT '{}',
    submitted_at TEXT NOT NULL,
    started_at   TEXT,
    ended_at     TEXT
);

CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_by_name ON jobs (name);

CREATE TABLE attempts (
    job        INTEGER NOT NULL REFERENCES jobs (id),
    number     INTEGER NOT NULL,
    placement  TEXT NOT NULL,
    started_at TEXT NOT NULL,
    ended_at   TEXT,
    outcome    TEXT,
    plan       TEXT,
    PRIMARY KEY (job, number)
);

-- A device is held by one attempt at most: the database itself refuses a second holder.
CREATE TABLE held_devices (
    node    TEXT NOT NULL,
    device  TEXT NOT NULL,
    job     INTEGER NOT NULL REFERENCES jobs (id),
    attempt INTEGER NOT NULL,
    PRIMARY KEY (node, device)
);

CREATE INDEX held_devices_by_job ON held_devices (job);

CREATE TABLE events (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    at      TEXT NOT NULL,
    job     INTEGER,
    attempt INTEGER,
    node    TEXT,
    kind    TEXT NOT NULL,
    text    TEXT NOT NULL
);

CREATE INDEX events_by_job ON events (job, seq);
