"""The agent's process: start, stop, backups, clock, and who gets which service. Does not schedule or launch."""
