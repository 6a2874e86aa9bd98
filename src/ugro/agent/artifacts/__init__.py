"""What jobs leave behind, collected from the nodes: logs, outputs, checkpoints, environments."""
