"""The health score of a node, and ``ugro doctor``. Does not poll: the kernel's reports are judged."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "health",
    __name__,
    commands={
        "doctor": Command(
            "ugro.features.health.cli:doctor", "Find problems on nodes and between them, with remedies.", "Cluster"
        ),
    },
)
