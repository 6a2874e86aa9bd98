"""Metrics of nodes and jobs for other systems: how they are written, and where they wait while a server is away."""
