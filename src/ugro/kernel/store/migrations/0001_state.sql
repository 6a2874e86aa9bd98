-- What survives the agent: which nodes take no new work, and how often an agent has been started here.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

CREATE TABLE drained_nodes (
    name       TEXT PRIMARY KEY,
    reason     TEXT NOT NULL,
    drained_at TEXT NOT NULL,
    -- A person, or discovery because its source no longer lists it. Only the latter is undone by itself.
    drained_by TEXT NOT NULL DEFAULT 'person'
);

-- Jobs, their attempts, the devices they hold, and everything that happened, once and in order.
CREATE TABLE jobs (
    id                   INTEGER PRIMARY KEY AUTOINCREMENT,
    submit_key           TEXT NOT NULL UNIQUE,
    name                 TEXT NOT NULL,
    user_name            TEXT NOT NULL,
    spec                 TEXT NOT NULL,
    -- The spec as lists show it, where the spec itself is large: see store/job_rows.py.
    brief                TEXT,
    state                TEXT NOT NULL,
    reason               TEXT NOT NULL,
    attempt              INTEGER NOT NULL DEFAULT 0,
    placement            TEXT,
    exit_code            INTEGER,
    ending               TEXT,
    tries                TEXT NOT NULL DEFAULT '{}',
    submitted_at         TEXT NOT NULL,
    started_at           TEXT,
    ended_at             TEXT,
    -- A time limit counts from here; started_at stays what it was when the job was first started.
    attempt_started_at   TEXT,
    -- What a job made, what it was made with, and whether it has to be made again.
    results_removed_at   TEXT,
    -- The result cache: the same key is the same work; a job that was not run points to the one that did it.
    cache_key            TEXT,
    cached_from          INTEGER REFERENCES jobs (id),
    -- Where the submitted code came from, such as its git commit.
    origin               TEXT,
    -- Beside each time that a duration is counted from: the boot of this machine, and the clock of that boot. Nobody can
    -- set it, so a wall clock that jumps changes no duration.
    submitted_boot       TEXT,
    started_boot         TEXT,
    attempt_started_boot TEXT,
    ended_boot           TEXT,
    -- Jobs that only their user and operators see.
    private              INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_by_name ON jobs (name);

CREATE TABLE attempts (
    job          INTEGER NOT NULL REFERENCES jobs (id),
    number       INTEGER NOT NULL,
    placement    TEXT NOT NULL,
    started_at   TEXT NOT NULL,
    ended_at     TEXT,
    outcome      TEXT,
    plan         TEXT,
    -- How an attempt failed: the culprit, its last lines, what it looks like.
    failure      TEXT,
    started_boot TEXT,
    ended_boot   TEXT,
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

-- Jobs that are over and whose last checkpoint is still to be brought home, before the nodes forget them.
CREATE TABLE to_keep (
    job INTEGER PRIMARY KEY REFERENCES jobs (id)
);

CREATE INDEX jobs_by_cache_key ON jobs (cache_key) WHERE cache_key IS NOT NULL;

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

-- The trees of code that were taken, by their hash, and which of each folder a node got last.
CREATE TABLE snapshots (
    id       TEXT PRIMARY KEY,
    folder   TEXT NOT NULL,
    taken_at TEXT NOT NULL
);

CREATE TABLE sent_code (
    node     TEXT NOT NULL,
    folder   TEXT NOT NULL,
    snapshot TEXT NOT NULL,
    sent_at  TEXT NOT NULL,
    PRIMARY KEY (node, folder)
);

-- Alerts that are on, so that an agent that starts anew does not tell of them a second time.
CREATE TABLE alerts (
    rule          TEXT NOT NULL,
    node          TEXT NOT NULL,
    severity      TEXT NOT NULL,
    worst         TEXT NOT NULL,
    text          TEXT NOT NULL,
    first_seen_at REAL NOT NULL,
    started_at    REAL NOT NULL,
    told_at       REAL NOT NULL,
    PRIMARY KEY (rule, node)
);

CREATE INDEX events_by_kind ON events (kind, seq);

-- What people write about jobs. Tags are a JSON list.
CREATE TABLE notes (
    job        INTEGER PRIMARY KEY REFERENCES jobs (id),
    text       TEXT NOT NULL,
    tags       TEXT NOT NULL,
    changed_at TEXT NOT NULL
);

-- What small commands wrote, recorded with their end. Files are made of it when somebody reads it.
CREATE TABLE small_logs (
    job     INTEGER NOT NULL REFERENCES jobs (id),
    attempt INTEGER NOT NULL,
    rank    INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (job, rank)
) WITHOUT ROWID;

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

-- Who did what. Rows are added and, when they are old, removed; never changed.
CREATE TABLE audit (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    at      TEXT NOT NULL,
    user    TEXT NOT NULL,
    via     TEXT NOT NULL,
    action  TEXT NOT NULL,
    subject TEXT NOT NULL,
    outcome TEXT NOT NULL
);

CREATE INDEX audit_by_time ON audit (at);

-- What was resolved for a request on a platform: the same request stays the same environment until a user asks for newer
-- packages.
CREATE TABLE resolutions (
    request      TEXT PRIMARY KEY, -- a hash, without passwords
    name         TEXT NOT NULL,
    requirements TEXT NOT NULL,
    at           TEXT NOT NULL
);

-- The files that are sent for an environment: a tree in the content store, and what is in it.
CREATE TABLE environment_files (
    name    TEXT PRIMARY KEY,
    tree    TEXT NOT NULL,
    content TEXT NOT NULL
);

-- What was measured on nodes, by measurement. Figures are JSON: most of them are of devices, whose number differs.
CREATE TABLE node_figures (
    run         INTEGER NOT NULL,
    node        TEXT NOT NULL,
    measured_at TEXT NOT NULL,
    content     TEXT NOT NULL,
    PRIMARY KEY (node, run)
) WITHOUT ROWID;

-- The highest value of each figure that was ever measured on an idle node, and when.
CREATE TABLE best_figures (
    node        TEXT NOT NULL,
    what        TEXT NOT NULL,
    value       REAL NOT NULL,
    measured_at TEXT NOT NULL,
    PRIMARY KEY (node, what)
) WITHOUT ROWID;

-- The newest of each pair; the first node of a pair is the one that connected.
CREATE TABLE link_figures (
    source  TEXT NOT NULL,
    target  TEXT NOT NULL,
    content TEXT NOT NULL,
    PRIMARY KEY (source, target)
) WITHOUT ROWID;

-- The newest of each set of nodes and size.
CREATE TABLE allreduce_figures (
    nodes      TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    run        INTEGER NOT NULL,
    content    TEXT NOT NULL,
    PRIMARY KEY (nodes, size_bytes)
) WITHOUT ROWID;

-- What short trials of trainings measured, by code, arguments and device; and what was predicted of jobs. JSON.
CREATE TABLE trials (
    key     TEXT PRIMARY KEY,
    content TEXT NOT NULL,
    made_at TEXT NOT NULL
);

CREATE TABLE forecasts (
    job     INTEGER PRIMARY KEY REFERENCES jobs (id),
    content TEXT NOT NULL
);

-- Nodes that joined by themselves. They are known here and not in the cluster file, so that an agent that starts while
-- their registry is down still finds their jobs.
CREATE TABLE discovered_nodes (
    name      TEXT PRIMARY KEY,
    candidate TEXT NOT NULL,
    has_left  INTEGER NOT NULL DEFAULT 0,
    -- The order in which nodes joined, in a column of its own: only SQLite numbers its rows.
    place     INTEGER NOT NULL DEFAULT 0
);

-- Ray clusters: what is wanted of each. Its head and workers are jobs, found by keys that begin with its own. JSON.
CREATE TABLE ray_clusters (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    name    TEXT NOT NULL,
    state   TEXT NOT NULL,
    content TEXT NOT NULL
);

-- Of two that have one name, at most one has not ended.
CREATE UNIQUE INDEX ray_clusters_open ON ray_clusters (name) WHERE state <> 'ended';

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
    -- What the sampler of a sweep noted when it was asked for a trial, as JSON: CMA-ES and QMC find it again there.
    memory   TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (sweep, number)
);

CREATE INDEX sweep_trials_job ON sweep_trials (job);

-- Services: what is wanted of each. Replicas and doors are jobs, found by keys that begin with the service's own. JSON.
CREATE TABLE services (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    key     TEXT NOT NULL UNIQUE,
    name    TEXT NOT NULL,
    state   TEXT NOT NULL,
    content TEXT NOT NULL
);

-- Of two that have one name, at most one has not ended.
CREATE UNIQUE INDEX services_open ON services (name) WHERE state <> 'ended';

-- Nodes that sleep: where each stands, written before it is suspended or woken, and what is known of it while it cannot
-- be asked. JSON.
CREATE TABLE node_power (
    name      TEXT PRIMARY KEY,
    record    TEXT NOT NULL,
    machine   TEXT,
    facts     TEXT,
    interface TEXT
);

-- Calls of hooks, in order: those that wait, and the newest of the others.
CREATE TABLE hook_deliveries (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT NOT NULL UNIQUE,
    hook       TEXT NOT NULL,
    body       TEXT NOT NULL,
    state      TEXT NOT NULL,
    tries      INTEGER NOT NULL DEFAULT 0,
    error      TEXT NOT NULL DEFAULT '',
    created_at TEXT NOT NULL,
    boot       TEXT NOT NULL,
    is_test    INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX hook_deliveries_waiting ON hook_deliveries (hook, state, seq);

CREATE INDEX jobs_private ON jobs (user_name) WHERE private = 1;

-- Tokens for programs: each acts for a user, with at most that user's role. The token itself is nowhere.
CREATE TABLE tokens (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    name         TEXT NOT NULL,
    user_name    TEXT NOT NULL,
    role         TEXT NOT NULL,
    hash         TEXT NOT NULL UNIQUE,
    created_at   TEXT NOT NULL,
    expires_at   TEXT NOT NULL,
    revoked_at   TEXT,
    last_used_at TEXT,
    last_used_by TEXT NOT NULL DEFAULT ''
);

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

-- The logins that jobs were ever started through ("ann@gpu1"): an agent that starts asks those that are not
-- clear what they have, as it asks nodes.
CREATE TABLE logins (
    name     TEXT PRIMARY KEY,
    is_clear INTEGER NOT NULL DEFAULT 0 -- it had nothing when it was closed, and nothing was started there since
);
