"""Watching nodes and jobs: polling, alerts, notifications, metrics."""
