"""What is to be known of a run besides how it ended: what its ranks say of themselves, and that they never met.

``ugro.train`` leaves its notices in files, one for each rank. That ranks have not met is seen from outside, whatever
they run: each of them that forms a process group connects to a port of the first one. A connection that was closed
shows for a minute; a rank that computes with torch all the same trains alone.
"""

from __future__ import annotations

import contextlib
import os
from typing import FrozenSet, List, Optional

from ugro.node import foreign
from ugro.node.clock import clock_s
from ugro.node.runs.ranks import Rank
from ugro.node.runs.rundir import RunDir
from ugro.node.runs.runspec import RunSpec

FOLDER = "notices"
_MOST, _LONGEST = 4, 200
_MOST_FILES = 16
_MOST_BYTES = 8192
_MOST_TABLE_BYTES = 8 << 20
_FIRST_LOOK_S, _LONGEST_PAUSE_S = 1.0, 30.0
_PATIENCE_S = 180.0  # preparing data takes its time
_LIBRARY = b"libtorch"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def read(run: RunDir) -> List[str]:
    """Nobody but its ranks writes them, which may write anything."""
    found: List[str] = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(run.file(FOLDER)))[:_MOST_FILES]:
            if name.endswith(".json"):
                found += [text for text in _file(os.path.join(run.file(FOLDER), name), run.name) if text not in found]
    return found[:_MOST]


def _file(path: str, run: str) -> List[str]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            document = foreign.parsed(os.read(fd, _MOST_BYTES))
        finally:
            os.close(fd)
        if document["run"] == run:
            return [shown(str(text)) for text in list(document["notices"])[:_MOST]]
    return []


def shown(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:_LONGEST])


class MeetingPlace:
    """Watches, beside the first rank, whether anybody comes to where the ranks are to meet."""

    def __init__(self, port: int, ranks: int) -> None:
        self._port, self._count = port, ranks
        self._before = _connections(port)  # of the look whether all nodes reach it
        self._has_met = self._computes = False
        self._begun_s = clock_s()
        self._look_at, self._pause_s = self._begun_s + _FIRST_LOOK_S, _FIRST_LOOK_S

    @classmethod
    def of(cls, spec: RunSpec) -> Optional[MeetingPlace]:
        """None where the ranks are not to meet, or on another node."""
        env = spec.ranks[0].env
        with contextlib.suppress(KeyError, ValueError):
            port, ranks = int(env[b"MASTER_PORT"]), int(env[b"WORLD_SIZE"])
            if ranks > 1 and int(env[b"RANK"]) == 0 and not spec.is_elastic:
                return cls(port, ranks)
        return None

    def look(self, ranks: List[Rank]) -> None:
        """Now and then, ever more rarely."""
        now = clock_s()
        if self._has_met or now < self._look_at:
            return
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        self._look_at = now + self._pause_s
        self._has_met = self._has_come()
        self._computes = self._computes or any(rank.is_running and _has_torch(rank.pid) for rank in ranks)

    def notice(self, *, is_over: bool) -> Optional[str]:
        """``is_over``: all ranks have done what they had to."""
        if self._has_met or not self._computes:
            return None
        if is_over:
            self._has_met = self._has_come()  # a last look: connections of before still show
        elif clock_s() < self._begun_s + _PATIENCE_S:
            return None
        if self._has_met:
            return None
        verb = "never met" if is_over else "have not met yet"
        return "its %d ranks %s: each trains alone, on all data that the script does not divide itself" % (
            self._count, verb,
        )  # fmt: skip

    def _has_come(self) -> bool:
        now = _connections(self._port)
        return now is None or self._before is None or not now <= self._before


def _connections(port: int) -> Optional[FrozenSet[bytes]]:
    """Those that somebody waits for, has, or had within the last minute; None if it cannot be told."""
    word = b":%04X " % port
    found: List[bytes] = []
    for table in _TABLES:
        try:
            with open(table, "rb") as file:
                content = file.read(_MOST_TABLE_BYTES)
        except FileNotFoundError:
            continue  # without IPv6
        except OSError:
            return None
        if len(content) == _MOST_TABLE_BYTES:
            return None
        # After the number of a line come its two ends.
        found += [b" ".join(line.split()[1:3]) for line in content.split(b"\n") if word in line]
    return frozenset(found)


def _has_torch(pid: int) -> bool:
    with contextlib.suppress(OSError), open("/proc/%d/maps" % pid, "rb") as file:
        return _LIBRARY in file.read(_MOST_TABLE_BYTES)
    return False
