"""Alerts about nodes: when they are raised, and where they are sent. Does not judge health: it hears reports."""
