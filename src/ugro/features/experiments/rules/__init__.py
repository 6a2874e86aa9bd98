"""Decisions and statistics of comparisons. No I/O."""
