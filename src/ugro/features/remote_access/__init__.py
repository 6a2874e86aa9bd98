"""The agent from another machine: login, relay, and the files of that client. Opens no port."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "remote_access",
    __name__,
    commands={
        "login": Command(
            "ugro.features.remote_access.cli:login", "Use the agent of another machine from now on.", "Cluster"
        ),
        "logout": Command("ugro.features.remote_access.cli:logout", "Use this machine's own agent again.", "Cluster"),
        "relay": Command(
            "ugro.features.remote_access.cli_relay:relay",
            "Carry the connections of a client on another machine.",
            "Cluster",
        ),
    },
)
