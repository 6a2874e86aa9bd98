"""A job's whole life: spec, states, rows, submit, list, why. Does not talk to nodes outside of ``engine/``."""
