"""The Python that a job has: resolved, made by uv on nodes, checked, removed.

Does not install anything outside its folder.
"""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "environments",
    __name__,
    commands={
        "env": Command(
            "ugro.features.environments.cli:env", "List, show and remove the Python environments on nodes.", "Cluster"
        ),
        "node setup": Command(
            "ugro.features.environments.cli:setup",
            "Make the Python environment on nodes, and compare versions.",
        ),
    },
    settings={"environments": "ugro.features.environments.config:EnvironmentsSection"},
    on_nodes=("node",),
)
