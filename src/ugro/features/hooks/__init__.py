"""Signed calls when queues grow, nodes idle or jobs end. Does not start or stop machines itself."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "hooks",
    __name__,
    commands={
        "hooks": Command(
            "ugro.features.hooks.cli:hooks", "Show and test what is called when something happens.", "Observe"
        ),
    },
    settings={"hooks": "ugro.features.hooks.config:HookSection"},
)
