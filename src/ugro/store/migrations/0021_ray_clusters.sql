-- Ray clusters: what is wanted of each. Its head and workers are jobs, found by keys that begin with its own. JSON.
CREATE TABLE ray_clusters (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    name    TEXT NOT NULL,
    state   TEXT NOT NULL,
    content TEXT NOT NULL
);

-- Of two that have one name, at most one has not ended.
CREATE UNIQUE INDEX ray_clusters_open ON ray_clusters (name) WHERE state <> 'ended';
