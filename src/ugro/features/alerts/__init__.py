"""Alerts about nodes: when they are raised, and where they are sent. Does not judge health: it hears reports."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "alerts",
    __name__,
    commands={
        "alerts": Command(
            "ugro.features.alerts.cli:alerts", "Show alerts about nodes, and test notification channels.", "Observe"
        ),
    },
    settings={"alerts": "ugro.features.alerts.config:AlertSection"},
)
