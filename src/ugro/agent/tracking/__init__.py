"""What the agent knows about the cluster now: configuration, nodes, health, runs."""
