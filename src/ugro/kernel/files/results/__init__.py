"""Logs, outputs and checkpoints, fetched from nodes and kept."""
