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
