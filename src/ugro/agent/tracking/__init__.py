"""What the agent knows of the cluster right now: configuration, nodes, health, runs."""
