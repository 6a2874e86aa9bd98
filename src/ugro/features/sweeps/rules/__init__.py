"""Decisions of a search: its space, the next trial, early ends. No I/O."""
