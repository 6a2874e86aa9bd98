"""Simulated machines on this one, and the demo. Does not take part in a real cluster."""
