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
