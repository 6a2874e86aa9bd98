-- Sweeps, and their trials: a row for each trial before its job is submitted. JSON where a type is not plain.
CREATE TABLE sweeps (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    key        TEXT NOT NULL UNIQUE,
    name       TEXT NOT NULL,
    user       TEXT NOT NULL,
    state      TEXT NOT NULL,
    reason     TEXT NOT NULL DEFAULT '',
    document   TEXT NOT NULL,
    spec       TEXT NOT NULL,
    budget     TEXT NOT NULL,
    created_at TEXT NOT NULL,
    elapsed_s  REAL NOT NULL DEFAULT 0
);

CREATE TABLE sweep_trials (
    sweep    INTEGER NOT NULL REFERENCES sweeps (id),
    number   INTEGER NOT NULL,
    settings TEXT NOT NULL,
    asked    TEXT NOT NULL,
    state    TEXT NOT NULL,
    job      INTEGER,
    last     REAL,
    best     REAL,
    step     INTEGER,
    took_s   REAL,
    gpus     INTEGER NOT NULL DEFAULT 0,
    reason   TEXT NOT NULL DEFAULT '',
    ending   TEXT,
    history  TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (sweep, number)
);

CREATE INDEX sweep_trials_job ON sweep_trials (job);
