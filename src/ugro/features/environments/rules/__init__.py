"""Decisions about environments. No I/O."""
