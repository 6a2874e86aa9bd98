"""Unequal nodes on one machine, for trying and testing."""
