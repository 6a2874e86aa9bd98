"""A job written for Slurm, Kubernetes or torchrun. Does not submit it there."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "export",
    __name__,
    commands={
        "export": Command("ugro.features.export.cli:export", "Write a job for Slurm, Kubernetes or torchrun.", "Jobs"),
    },
)
