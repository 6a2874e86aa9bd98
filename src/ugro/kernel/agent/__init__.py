"""The agent's process: start, stop, backups, clock. Does not schedule or launch."""
