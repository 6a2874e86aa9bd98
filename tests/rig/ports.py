"""Ports of this machine that nobody uses."""

from __future__ import annotations

import random
import socket

_PORTS = range(11_000, 15_000)  # below what the kernel, rendezvous and Ray give out


def free_port() -> int:
    """Kept from other processes of tests as long as this one lives: who listens there may take a while to start."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if _is_claimed(port) and _is_free(port):
            return port
    raise AssertionError(f"no port is free between {_PORTS[0]} and {_PORTS[-1]}")


def _is_claimed(port: int) -> bool:
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0ugro-test-port-{port}")
    except OSError:
        name.close()
        return False
    name.detach()  # open until this process ends
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
