"""Models and commands behind an HTTP door: replicas, probes, rollouts. Does not train."""

from __future__ import annotations

from ugro.kernel.feature import Command, Entry, Feature, Page

FEATURE = Feature(
    "services",
    __name__,
    commands={
        "serve": Command(
            "ugro.features.services.cli:serve", "Serve a trained model, or any command, behind an HTTP API.", "Jobs"
        ),
    },
    pages={
        "GET /services": Page(),
        "GET /services/{word}": Page(of="service"),
    },
    menu=(Entry("/services", "Services", "v"),),
)
