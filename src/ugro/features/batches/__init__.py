"""``ugro map`` and ``ugro.Pool``: a function over many items.

Does not queue anything: its workers are jobs, Ray or processes.
"""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "batches",
    __name__,
    commands={
        "map": Command(
            "ugro.features.batches.cli:map_", "Run a function over many items, in batches that need no tuning.", "Jobs"
        ),
        "estimate": Command(
            "ugro.features.batches.cli:estimate", "Predict how long a map takes, here and on a cluster.", "Jobs"
        ),
    },
)
