"""Ray clusters as ordinary jobs."""
