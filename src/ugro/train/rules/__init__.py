"""Decisions of a training: shares, rounds, cuts of a pipeline, who trains on. No torch, no I/O."""
