-- The logins that jobs were ever started through ("ann@gpu1"): an agent that starts asks those that are not
-- clear what they have, as it asks nodes.
CREATE TABLE logins (
    name TEXT PRIMARY KEY,
    is_clear INTEGER NOT NULL DEFAULT 0 -- it had nothing when it was closed, and nothing was started there since
);
