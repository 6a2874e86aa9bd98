-- Nodes that joined by themselves. They are known here and not in the cluster file, so that an agent that starts while
-- their registry is down still finds their jobs.
CREATE TABLE discovered_nodes (
    name      TEXT PRIMARY KEY,
    candidate TEXT NOT NULL,
    has_left  INTEGER NOT NULL DEFAULT 0
);

-- Who drained a node: a person, or discovery because its source no longer lists it. Only the latter is undone by itself.
ALTER TABLE drained_nodes ADD COLUMN drained_by TEXT NOT NULL DEFAULT 'person';
