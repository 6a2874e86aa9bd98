"""Tables and comparisons of runs, notes, and ``ugro experiment``.

Does not run anything itself: an ablation is a sweep.
"""

from __future__ import annotations

from ugro.kernel.feature import Command, Entry, Feature, Page

FEATURE = Feature(
    "experiments",
    __name__,
    needs=("sweeps",),
    commands={
        "experiment": Command(
            "ugro.features.experiments.cli:experiment", "Compare ways to train on your nodes, with a report.", "Jobs"
        ),
        "compare": Command("ugro.features.experiments.cli:compare", "Show what differs between jobs.", "Results"),
        "note": Command("ugro.features.experiments.cli:note", "Show or change the note and tags of a job.", "Results"),
    },
    pages={
        "GET /experiments": Page(),
        "GET /compare": Page(),
        "GET /compare/code": Page(),
    },
    menu=(Entry("/experiments", "Experiments", "e"), Entry("/compare", "Compare", "m"),),
)
