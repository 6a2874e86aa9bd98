"""Models and commands behind an HTTP door: replicas, probes, rollouts. Does not train."""
