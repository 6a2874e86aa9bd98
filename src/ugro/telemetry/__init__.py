"""Metrics and notifications: the metric store, its collector, Prometheus' text format, channels."""
