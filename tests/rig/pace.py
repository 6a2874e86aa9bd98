"""How fast nodes really are: the same work on all of them in the same seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ugro.client.client import Client, Ended, OutputPiece
from ugro.kernel.support.errors import RemoteFailure

_LEAD_S = 1.0  # within it, the slowest node has started its part
# Argument 1 is when to begin, which all nodes of a lab read from one clock, and 2 for how many seconds.
_WORK = """
import sys, time
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
begin = now = time.monotonic()
end, rounds = begin + float(sys.argv[2]), 0
while now < end:
    sum(range(2000))
    rounds += 1
    now = time.monotonic()
print(rounds / (now - begin))
"""


@dataclass(frozen=True, slots=True)
class Pace:
    node: str
    rounds_per_s: float


def measure(client: Client, nodes: Sequence[str] = ("@all",), *, seconds: float = 3.0) -> list[Pace]:
    """In the order of the names: lab2 before lab10."""
    begin = time.time() + _LEAD_S
    argv = [sys.executable, "-I", "-S", "-c", _WORK, f"{begin:.6f}", f"{seconds:g}"]
    written: dict[str, bytes] = {}
    ends: dict[str, Ended] = {}
    for event in client.exec(nodes, argv):
        if isinstance(event, OutputPiece):
            written[event.node] = written.get(event.node, b"") + event.content
        else:
            ends[event.node] = event
    names = sorted(ends, key=lambda name: (len(name), name))
    return [_pace(ends[name], written.get(name, b"")) for name in names]


def _pace(end: Ended, written: bytes) -> Pace:
    if end.error is not None:
        raise end.error
    try:
        return Pace(end.node, float(written))
    except ValueError as error:
        text = written.decode("utf-8", "replace").strip()
        raise RemoteFailure(f"the measurement failed: {text[-200:]}", subject=end.node) from error
