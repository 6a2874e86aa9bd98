-- What short trials of trainings measured, by code, arguments and device; and what was predicted of jobs. JSON.
CREATE TABLE trials (
    key     TEXT PRIMARY KEY,
    content TEXT NOT NULL,
    made_at TEXT NOT NULL
);

CREATE TABLE forecasts (
    job     INTEGER PRIMARY KEY REFERENCES jobs (id),
    content TEXT NOT NULL
);
