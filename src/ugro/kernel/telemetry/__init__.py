"""Metrics of jobs and nodes: stored, summed up in bins, shown to Prometheus. Does not judge them."""
