"""The agent's side of ``ugro.train``: headline, profile, energy. Does not influence a running training."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "training",
    __name__,
    commands={
        "profile": Command("ugro.features.training.cli:profile", "Show where a training's time goes.", "Results"),
    },
    settings={"energy": "ugro.features.training.config:EnergySection"},
    on_nodes=("on_node.py",),
)
