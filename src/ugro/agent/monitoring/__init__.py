"""Monitoring of nodes and jobs: probes, alerts, notifications, metrics."""
