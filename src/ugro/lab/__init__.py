"""Simulated machines on this one, and the demo. Not used by a real cluster."""
