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
