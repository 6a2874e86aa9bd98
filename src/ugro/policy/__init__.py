"""Decisions: pure functions of what is known, each with its reason."""
