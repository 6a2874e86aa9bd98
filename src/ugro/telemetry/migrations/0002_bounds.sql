-- A curve's least and largest value: a table of thousands of jobs reads these and no points.
ALTER TABLE series ADD COLUMN value_min REAL;
ALTER TABLE series ADD COLUMN value_max REAL;
