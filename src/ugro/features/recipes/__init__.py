"""Trainings for ``ugro launch --model``. Does not download models: the job does."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "recipes",
    __name__,
    commands={
        "recipe": Command(
            "ugro.features.recipes.cli:recipe", "List, show and copy the built-in training recipes.", "Jobs"
        ),
    },
    on_nodes=("on_node.py",),
)
