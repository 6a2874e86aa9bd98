-- Where a curve comes from: of several with one name, the one with the smallest number is kept.
ALTER TABLE series ADD COLUMN origin INTEGER NOT NULL DEFAULT 0;
-- A curve's last finite value; where its least and largest are; and from which step on it is not finite.
ALTER TABLE series ADD COLUMN finite_value REAL;
ALTER TABLE series ADD COLUMN min_step INTEGER;
ALTER TABLE series ADD COLUMN max_step INTEGER;
ALTER TABLE series ADD COLUMN odd_step INTEGER;

-- What a reader needs to go on, and what the names of a file's metrics begin with.
ALTER TABLE source ADD COLUMN state TEXT NOT NULL DEFAULT '';
ALTER TABLE source ADD COLUMN prefix TEXT NOT NULL DEFAULT '';

-- Parameters that a training wrote beside its metrics.
CREATE TABLE parameter (
    owner  TEXT NOT NULL,
    name   TEXT NOT NULL,
    value  TEXT NOT NULL,
    PRIMARY KEY (owner, name)
);
