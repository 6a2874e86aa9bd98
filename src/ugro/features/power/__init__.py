"""Machines that people also use: their owner comes first, idle ones sleep and are woken.

Does not end jobs: it asks the engine.
"""
