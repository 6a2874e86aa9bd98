"""Searches for the best settings of a training. Does not train: each trial is a job."""

from __future__ import annotations

from ugro.kernel.feature import Command, Entry, Feature, Page

FEATURE = Feature(
    "sweeps",
    __name__,
    commands={
        "sweep": Command("ugro.features.sweeps.cli:sweep", "Search for the best settings of a training.", "Jobs"),
    },
    pages={
        "GET /sweeps": Page(),
        "GET /sweeps/{word}": Page(of="sweep"),
        "GET /sweeps/{word}/importance": Page(of="sweep"),
        "GET /sweeps/{word}/trials.csv": Page(of="sweep"),
    },
    menu=(Entry("/sweeps", "Sweeps", "w"),),
)
