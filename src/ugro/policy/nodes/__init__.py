"""Judging nodes: health, alerts, diagnosis, versions, connectivity."""
