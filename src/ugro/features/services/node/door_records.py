"""What a door must not forget: servers, keys, and the share of canaries. One file, from which HAProxy is started."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from ugro.features.services.node.door_config import CANARY, LOG_FIELDS, REPLICAS, WAITING
from ugro.node.process.processes import say

# --- latency ----------------------------------------------------------------------------------------------------------
# Latencies in bounded memory: counts in buckets whose bounds grow by a tenth, over a window that slides by parts.
#
# It also runs on nodes, as a part of the door's program: Python 3.9 and its standard library alone.


LEAST_S = 0.0005
_GROWTH = math.log(1.1)
_BUCKETS = 170  # up to an hour and a half; what takes longer counts as that
_PARTS = 6


class Histogram:
    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        bucket = _bucket(seconds)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def merge(self, other: Histogram) -> None:
        self.count += other.count
        self.total_s += other.total_s
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def quantile(self, share: float) -> float:
        """Within 5 %; 0 if there is nothing."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return _middle(bucket)
        return 0.0

    def summary(self) -> dict[str, float]:
        mean_s = self.total_s / self.count if self.count else 0.0
        shares = {f"p{share}_s": self.quantile(share / 100) for share in (50, 90, 99)}
        return {"count": self.count, "mean_s": mean_s, **shares}


class Window:
    """The last ``seconds``, up to one part of them more or less."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._parts: list[Histogram] = [Histogram()]
        self._ends_at = -math.inf

    def add(self, seconds: float, now: float) -> None:
        self._slide(now)
        self._parts[-1].add(seconds)

    def whole(self, now: float) -> Histogram:
        self._slide(now)
        found = Histogram()
        for part in self._parts:
            found.merge(part)
        return found

    def _slide(self, now: float) -> None:
        step_s = self.seconds / _PARTS
        if now >= self._ends_at + self.seconds:
            self._parts, self._ends_at = [Histogram()], now + step_s
        while now >= self._ends_at:
            self._parts = [*self._parts[1 - _PARTS :], Histogram()]
            self._ends_at += step_s


def _bucket(seconds: float) -> int:
    if seconds <= LEAST_S:
        return 0
    return min(_BUCKETS - 1, 1 + int(math.log(seconds / LEAST_S) / _GROWTH))


def _middle(bucket: int) -> float:
    return LEAST_S * math.exp(_GROWTH * (bucket - 0.5)) if bucket else LEAST_S / 2


# --- measures ---------------------------------------------------------------------------------------------------------
# What a door measures: the times of requests, from HAProxy's log; and its counters.


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


# --- records ----------------------------------------------------------------------------------------------------------


MOST_SERVERS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_HASH = re.compile(r"[0-9a-f]{64}")
_MOST_WEIGHT, _MOST_LIMIT = 256, 100_000


class InvalidError(Exception):
    """A request that cannot be done, in words."""


class Records:
    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "door.json")
        os.makedirs(folder, 0o700, exist_ok=True)
        self.servers: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.share = 0  # of the canaries, in thousandths
        self._next = 1
        self._load()

    def add(self, given: Mapping[str, Any]) -> dict[str, Any]:
        server = _server(given)
        if len(self.servers) >= MOST_SERVERS:
            raise InvalidError(f"a door has at most {MOST_SERVERS} servers")
        server["number"], self._next = self._next, self._next + 1
        self.servers[server["name"]] = server
        self.save()
        return server

    def drop(self, name: str) -> None:
        self.servers.pop(name, None)
        self.save()

    def set_keys(self, keys: Mapping[str, str]) -> None:
        self.keys = checked_keys(keys)
        self.save()

    def save(self) -> None:
        document = {"servers": self.servers, "keys": self.keys, "share": self.share, "next": self._next}
        temporary = f"{self._path}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)

    def _load(self) -> None:
        try:
            with open(self._path, encoding="utf-8") as file:
                found = json.load(file)
            servers = {str(name): {**one, **_server(one)} for name, one in found["servers"].items()}
            keys = checked_keys(found["keys"])
            self.servers, self.keys = servers, keys
            self.share, self._next = int(found["share"]), int(found["next"])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError, InvalidError) as error:
            # Nobody is let in who should not be, and the agent adds the servers again.
            say(f"{self._path} is damaged ({error!r}): the door begins without servers and keys")
            os.replace(self._path, f"{self._path}.damaged")


def checked_keys(given: Mapping[str, str]) -> dict[str, str]:
    for digest, name in given.items():
        if not _HASH.fullmatch(digest) or not _NAME.fullmatch(name):
            raise InvalidError(f"no key: {digest[:12]!r}, {name[:80]!r}")
    return dict(given)


def _server(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checked: it becomes words of HAProxy's configuration."""
    name = str(given["name"])
    if not _NAME.fullmatch(name) or name == WAITING:
        raise InvalidError(f"no name for a server: {name[:80]!r}")
    return {
        "name": name,
        "address": _address(str(given["address"])),
        "port": _number(given, "port", 1, 65535),
        "weight": _number(given, "weight", 1, _MOST_WEIGHT),
        "limit": _number(given, "limit", 0, _MOST_LIMIT),
        "canary": bool(given.get("canary")),
        "is_draining": bool(given.get("is_draining")),
    }


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise InvalidError(f"no IP address: {text[:80]!r}") from None


def _number(given: Mapping[str, Any], key: str, least: int, most: int) -> int:
    found = int(given[key])
    if not least <= found <= most:
        raise InvalidError(f"{key} {found} is not between {least} and {most}")
    return found


def weight_of(given: Mapping[str, Any]) -> int:
    return _number(given, "weight", 1, _MOST_WEIGHT)
