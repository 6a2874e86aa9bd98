"""Code to nodes; logs, outputs and checkpoints home. Does not start or end runs."""
