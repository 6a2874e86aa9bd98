-- Jobs that are over and whose last checkpoint is still to be brought home, before the nodes forget them.
CREATE TABLE to_keep (
    job INTEGER PRIMARY KEY REFERENCES jobs (id)
);
