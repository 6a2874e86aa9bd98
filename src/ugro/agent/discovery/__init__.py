"""Watches sources of machines, and lets those join whose host keys the user has accepted."""
