"""A job's whole life: spec, states, rows, submit, list, why. Does not talk to nodes: the engine does."""
