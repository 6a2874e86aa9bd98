"""``ugro plan``: how fast a training will be on each set of nodes. Does not place jobs."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "planning",
    __name__,
    needs=("recipes", "hardware",),
    commands={
        "plan": Command(
            "ugro.features.planning.cli:plan", "Predict how fast a training is on each set of nodes.", "Jobs"
        ),
    },
)
