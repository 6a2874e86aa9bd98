"""Decisions of the engine: the next step of an attempt, why it failed, whether it is tried again. No I/O."""
