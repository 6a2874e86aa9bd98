"""Which queued job starts where, and what the others wait for. Pure: a snapshot in, decisions with reasons out."""
