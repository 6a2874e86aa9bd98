-- The order in which nodes joined, in a column of its own: only SQLite numbers its rows.
ALTER TABLE discovered_nodes ADD COLUMN place INTEGER NOT NULL DEFAULT 0;
