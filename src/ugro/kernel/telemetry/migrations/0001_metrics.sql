-- Curves: one row for each, with a coarse summary of all its points, and its points in chunks.
CREATE TABLE series (
    id            INTEGER PRIMARY KEY,
    owner         TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    rank          INTEGER NOT NULL,
    key           TEXT NOT NULL,
    count         INTEGER NOT NULL DEFAULT 0,
    loose         INTEGER NOT NULL DEFAULT 0,
    loose_chunks  INTEGER NOT NULL DEFAULT 0,
    step_min      INTEGER,
    step_max      INTEGER,
    first_time_ms INTEGER,
    last_time_ms  INTEGER,
    last_step     INTEGER,
    last_value    REAL,
    summary       BLOB,
    -- A curve's least and largest value: a table of thousands of jobs reads these and no points.
    value_min     REAL,
    value_max     REAL,
    -- Where a curve comes from: of several with one name, the one with the smallest number is kept.
    origin        INTEGER NOT NULL DEFAULT 0,
    -- A curve's last finite value; where its least and largest are; and from which step on it is not finite.
    finite_value  REAL,
    min_step      INTEGER,
    max_step      INTEGER,
    odd_step      INTEGER,
    UNIQUE (owner, key, attempt, rank)
);

-- The bins stand before the points: a look at them does not read what comes after.
CREATE TABLE chunk (
    id        INTEGER PRIMARY KEY,
    series    INTEGER NOT NULL REFERENCES series (id) ON DELETE CASCADE,
    is_sealed INTEGER NOT NULL,
    count     INTEGER NOT NULL,
    step_min  INTEGER NOT NULL,
    step_max  INTEGER NOT NULL,
    bins      BLOB,
    steps     BLOB NOT NULL,
    times     BLOB NOT NULL,
    points    BLOB NOT NULL
);

CREATE INDEX chunk_by_series ON chunk (series, is_sealed, step_min);

-- How much of each mirrored file is in here: changed in the transaction that brings its points.
CREATE TABLE source (
    owner   TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    path    TEXT NOT NULL,
    place   INTEGER NOT NULL,
    -- What a reader needs to go on, and what the names of a file's metrics begin with.
    state   TEXT NOT NULL DEFAULT '',
    prefix  TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (owner, attempt, path)
);

-- Parameters that a training wrote beside its metrics.
CREATE TABLE parameter (
    owner TEXT NOT NULL,
    name  TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (owner, name)
);
