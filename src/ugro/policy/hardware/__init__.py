"""Measured hardware: who is measured when, whether a figure has become worse, and how fast a node is."""
