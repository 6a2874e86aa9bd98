"""Reads and edits cluster.yaml: kinds of values, sections, errors with file and line. Does not apply what it reads."""
