"""Which queued job starts where, and what the others wait for.

Does not act: a snapshot in, decisions with reasons out.
"""
