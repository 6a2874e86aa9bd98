"""Decisions about replicas, rollouts and scale. No I/O."""
