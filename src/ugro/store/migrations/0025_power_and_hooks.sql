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
