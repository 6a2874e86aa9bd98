"""Ports of this machine that nobody uses."""

from __future__ import annotations

import socket


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        found: int = probe.getsockname()[1]
        return found
