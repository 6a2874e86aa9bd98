"""Two network namespaces joined by a cable of a given speed, for ranks that are to feel a slow network.

Needs root and iproute2. Nothing outside the two namespaces is touched, and both go when it is over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_INTERFACE = "cable"
_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Shaped:
    namespaces: tuple[str, str]
    addresses: tuple[str, str]
    interface: str = _INTERFACE

    def command(self, rank: int) -> list[str]:
        """What to put before a command that is to run in one of them."""
        return ["ip", "netns", "exec", self.namespaces[rank]]


def missing() -> str | None:
    """Why there can be none here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


@contextlib.contextmanager
def shaped_link(rate: str) -> Iterator[Shaped]:
    names = tuple(f"ugro-bench-{os.getpid()}-{number}" for number in range(2))
    link = Shaped((names[0], names[1]), ("10.214.7.1", "10.214.7.2"))
    try:
        for name in names:
            _run(f"ip netns add {name}")
        _run(f"ip -n {names[0]} link add {_INTERFACE} type veth peer name {_INTERFACE} netns {names[1]}")
        for name, address in zip(names, link.addresses, strict=True):
            _run(f"ip -n {name} addr add {address}/24 dev {_INTERFACE}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {_INTERFACE} up")
            _run(f"ip netns exec {name} tc qdisc add dev {_INTERFACE} root tbf rate {rate} burst 256kb latency 50ms")
        yield link
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_TIMEOUT_S, check=False)


def _run(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{line}: {done.stderr.strip()}")
