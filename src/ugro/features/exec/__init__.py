"""``ugro exec``: one command on several nodes, now. Not a job: nothing is queued, collected or retried."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "exec",
    __name__,
    commands={
        "exec": Command("ugro.features.exec.cli:exec_", "Run a command on several nodes at once.", "Cluster"),
    },
)
