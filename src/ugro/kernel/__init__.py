"""What every feature stands on.

Does not know frames or features; what is still against that is in ``.importlinter`` and ``scripts/measure.py``.
"""
