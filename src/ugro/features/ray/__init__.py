"""Ray clusters on the nodes, as jobs. Does not schedule Ray's tasks."""
