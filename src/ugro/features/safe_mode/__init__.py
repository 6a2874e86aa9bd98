"""Stands still while the state may be older than the world.

Does not guess which is right: somebody says how to go on.
"""
