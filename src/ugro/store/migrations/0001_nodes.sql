-- What survives the agent: which nodes take no new work, and how often an agent has been started here.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

CREATE TABLE drained_nodes (
    name       TEXT PRIMARY KEY,
    reason     TEXT NOT NULL,
    drained_at TEXT NOT NULL
);
