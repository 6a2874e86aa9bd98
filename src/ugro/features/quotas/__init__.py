"""Limits, fair share and usage of users. Does not record use: the kernel's book of device time does."""

from __future__ import annotations

from ugro.kernel.feature import Command, Entry, Feature, Page

FEATURE = Feature(
    "quotas",
    __name__,
    commands={
        "usage": Command(
            "ugro.features.quotas.cli:usage", "Show what users and groups have used, against their quotas.", "Observe"
        ),
    },
    settings={
        "quotas": "ugro.features.quotas.config:QuotaSection",
        "fair_share": "ugro.features.quotas.config:FairShareSection",
    },
    pages={
        "GET /usage": Page(),
        "GET /usage.csv": Page(),
    },
    menu=(Entry("/usage", "Usage", "u"),),
)
