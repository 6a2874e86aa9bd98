"""Stands still while the state may be older than the world, until someone says how to go on."""
