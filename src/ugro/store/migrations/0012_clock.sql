-- Beside each time that a duration is counted from: the boot of this machine, and the clock of that boot. Nobody can
-- set it, so a wall clock that jumps changes no duration. Empty in rows of older versions.
ALTER TABLE jobs ADD COLUMN submitted_boot TEXT;
ALTER TABLE jobs ADD COLUMN started_boot TEXT;
ALTER TABLE jobs ADD COLUMN attempt_started_boot TEXT;
ALTER TABLE jobs ADD COLUMN ended_boot TEXT;
ALTER TABLE attempts ADD COLUMN started_boot TEXT;
ALTER TABLE attempts ADD COLUMN ended_boot TEXT;
