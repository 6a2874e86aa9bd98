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
