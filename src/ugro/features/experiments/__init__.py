"""Tables and comparisons of runs, notes, and ``ugro experiment``.

Does not run anything itself: an ablation is a sweep.
"""
