-- Jobs that only their user and operators see.
ALTER TABLE jobs ADD COLUMN private INTEGER NOT NULL DEFAULT 0;

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
