"""How machines become nodes: ssh configuration, LAN, ZooKeeper, Consul, a command. Does not connect to nodes itself."""

from __future__ import annotations

from ugro.kernel.feature import Command, Feature

FEATURE = Feature(
    "discovery",
    __name__,
    commands={
        "init": Command(
            "ugro.features.discovery.cli_init:init",
            "Write the cluster file from your SSH hosts, or add hosts to it.",
            "Cluster",
            is_here_only=True,
        ),
        "node discover": Command(
            "ugro.features.discovery.cli:discover",
            "Show the machines that discovery finds, or add them.",
        ),
    },
    settings={"discovery": "ugro.features.discovery.config:DiscoverySection"},
)
