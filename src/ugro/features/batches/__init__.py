"""``ugro map`` and ``ugro.Pool``: a function over many items.

Does not queue anything: its workers are jobs, Ray or processes.
"""
