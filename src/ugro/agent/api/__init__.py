"""The agent's HTTP API: one file per noun, each a thin layer over a service."""
