-- How an attempt failed: the culprit, its last lines, what it looks like.
ALTER TABLE attempts ADD COLUMN failure TEXT;
