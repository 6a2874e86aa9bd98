"""A job's part on one node: its directory, claim, supervisor, ranks, state and end."""
