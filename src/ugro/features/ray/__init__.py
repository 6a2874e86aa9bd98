"""Ray clusters on the nodes, as jobs. Does not schedule Ray's tasks."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "ray",
    __name__,
    needs=("environments",),
    commands={
        "cluster": Command(
            "ugro.features.ray.cli:cluster", "Run Ray clusters on the nodes: start, scale, stop.", "Cluster"
        ),
    },
    settings={"ray": "ugro.features.ray.config:RaySection"},
)
