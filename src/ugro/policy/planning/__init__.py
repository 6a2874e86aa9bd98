"""Predicts what sets of nodes do with a training, from short trials of it."""
