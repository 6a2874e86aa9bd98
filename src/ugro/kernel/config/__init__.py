"""Reads cluster.yaml: kinds of values, sections, errors with file and line. Does not apply anything."""
