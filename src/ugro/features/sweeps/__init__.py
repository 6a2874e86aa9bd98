"""Searches for the best settings of a training. Does not train: each trial is a job."""
