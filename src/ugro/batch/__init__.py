"""``ugro.Pool``: a function over many items, in batches that nobody has to tune. On this machine, or on Ray.

``worker`` and ``frames`` run where the work is done, and travel there by value: they import the standard library only.
"""
