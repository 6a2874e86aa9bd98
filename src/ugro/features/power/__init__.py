"""Machines that people also use: their owner comes first, idle ones sleep and are woken.

Does not end jobs: it asks the engine.
"""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "power",
    __name__,
    commands={
        "node sleep": Command("ugro.features.power.cli:sleep", "Suspend a node now, if nobody would miss it."),
        "node wake": Command("ugro.features.power.cli:wake", "Wake a node that sleeps."),
    },
    settings={
        "owner": "ugro.features.power.config:OwnerSection",
        "power": "ugro.features.power.config:PowerSection",
    },
    on_nodes=("node",),
)
