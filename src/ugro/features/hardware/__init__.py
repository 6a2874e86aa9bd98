"""Measured speed of devices, disks and links. Does not choose nodes: it says how fast they are."""

from __future__ import annotations

from ugro.kernel.feature import Command, Entry, Feature, Page

FEATURE = Feature(
    "hardware",
    __name__,
    commands={
        "node bench": Command(
            "ugro.features.hardware.cli:bench",
            "Measure devices, CPU, memory, storage and the network.",
        ),
    },
    pages={
        "GET /hardware": Page(),
    },
    menu=(Entry("/hardware", "Hardware", "h"),),
    on_nodes=("node",),
)
