"""Splitting a global batch over unequal devices."""
