"""What a door measures: the times of requests, from HAProxy's log; and its counters."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from ugro.policy.serving.door_config import CANARY, LOG_FIELDS, REPLICAS
from ugro.policy.serving.latency import LEAST_S, Window

WINDOW_S = 60.0
MOST_LINES_PER_S = 2000  # what is more is counted and not read
_SWITCHED = "101"
Rows = Mapping[str, Mapping[str, Mapping[str, str]]]


class Measures:
    """Bounded: a window and five sums for each server."""

    def __init__(self) -> None:
        self._all = Window(WINDOW_S)
        self._servers: dict[str, Window] = {}
        self._pace: dict[str, dict[str, float]] = {}
        self._rest = b""
        self._second, self._left = 0, MOST_LINES_PER_S
        self._seen = self._read = 0.0
        self._decayed_at = time.monotonic()

    def feed(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        now = time.monotonic()
        if int(now) != self._second:
            self._second, self._left = int(now), MOST_LINES_PER_S
        some = lines[: self._left]
        self._left -= len(some)
        self._count(len(lines), len(some), now)
        for line in some:
            self._take(line.decode("ascii", "replace").split(), now)

    def forget(self, name: str) -> None:
        self._servers.pop(name, None)
        self._pace.pop(name, None)

    def latency(self, name: str | None = None) -> dict[str, float]:
        window = self._all if name is None else self._servers.get(name)
        return window.whole(time.monotonic()).summary() if window else {}

    def pace(self, name: str) -> dict[str, float]:
        return dict(self._pace.get(name, {}))

    @property
    def sampled_share(self) -> float:
        return self._read / self._seen if self._seen else 1.0

    def _count(self, seen: int, read: int, now: float) -> None:
        """Fades with the window."""
        fade = math.exp((self._decayed_at - now) / WINDOW_S)
        self._seen, self._read, self._decayed_at = self._seen * fade + seen, self._read * fade + read, now

    def _take(self, fields: list[str], now: float) -> None:
        if len(fields) != len(LOG_FIELDS):
            return
        server, status, ended = fields[1], fields[2], fields[8]
        try:
            received, queued, total, at_once = (int(fields[place]) for place in (3, 4, 5, 6))
        except ValueError:  # "+" marks an incomplete one
            return
        # Without a server, unanswered, given up by its client, or no request any more but a tunnel.
        if server.startswith("<") or min(received, queued, total) < 0 or ended[0] == "C" or status == _SWITCHED:
            return
        seconds = max(LEAST_S, (total - received) / 1000)
        self._all.add(seconds, now)
        self._servers.setdefault(server, Window(WINDOW_S)).add(seconds, now)
        if status[0] in "23":
            self._add_pace(server, max(1, at_once), max(LEAST_S, (total - received - queued) / 1000))

    def _add_pace(self, server: str, at_once: int, seconds: float) -> None:
        x, y = math.log(at_once), math.log(seconds)
        sums = self._pace.setdefault(server, {})
        for key, amount in {"count": 1.0, "x": x, "y": y, "xx": x * x, "xy": x * y}.items():
            sums[key] = sums.get(key, 0.0) + amount


def parsed(text: str) -> Rows:
    """HAProxy's ``show stat``: proxy → server, or FRONTEND or BACKEND → column → value."""
    lines = [line for line in text.splitlines() if line]
    columns = lines[0].lstrip("# ").split(",") if lines else []
    found: dict[str, dict[str, Mapping[str, str]]] = {}
    for line in lines[1:]:
        row = {columns[place]: value for place, value in enumerate(line.split(",")[: len(columns)])}
        found.setdefault(row["pxname"], {})[row["svname"]] = row
    return found


def number(rows: Rows, name: str, column: str) -> int:
    """Of a server, in both backends together."""
    return sum(int(rows.get(backend, {}).get(name, {}).get(column) or 0) for backend in (REPLICAS, CANARY))


def is_up(rows: Rows, server: Mapping[str, Any]) -> bool:
    row = rows.get(CANARY if server["canary"] else REPLICAS, {}).get(server["name"], {})
    return row.get("status", "").startswith(("UP", "no check"))


def front(rows: Rows, column: str) -> int:
    return int(rows.get("door", {}).get("FRONTEND", {}).get(column) or 0)


def waiting(rows: Rows) -> int:
    """For no server in particular."""
    return sum(int(rows.get(backend, {}).get("BACKEND", {}).get("qcur") or 0) for backend in (REPLICAS, CANARY))
