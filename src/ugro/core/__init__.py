"""Nouns: jobs, nodes, plans, errors. No I/O."""
