"""Integrations with libraries that log: their values become metrics of the run. Each is imported on demand."""
