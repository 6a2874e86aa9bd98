"""Recent events, folded: a line for each job or node with its latest state, and one line for a burst of like jobs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ugro.core.event import Event
from ugro.core.job import JobState
from ugro.store.listing import Happened

MOST_LINES = 12
BURST = 4  # so many jobs of one name are one line
_MOST_NAMED = 20  # of the jobs of a burst
_STATES = frozenset(JobState)
_HOUSEKEEPING = frozenset({"retention"})  # for ``ugro events``, and nobody's activity
_NUMBERED = re.compile(r"[-_.]?\d+$")


@dataclass(frozen=True, slots=True)
class Line:
    """What happened to one job, to one node, or to the cluster; the newest event first."""

    events: tuple[Event, ...]
    name: str | None = None
    state: JobState | None = None  # now; None: a node, or a job that was removed

    @property
    def newest(self) -> Event:
        return self.events[0]

    @property
    def job(self) -> int | None:
        return self.newest.job

    @property
    def node(self) -> str | None:
        return self.newest.node if self.job is None else None

    @property
    def key(self) -> str:
        return f"job-{self.job}" if self.job is not None else f"node-{self.node}" if self.node else "cluster"

    @property
    def text(self) -> str:
        """Of the newest change of state: notes and the like do not say how a job is."""
        moves = (event for event in self.events if self.job is None or event.kind in _STATES)
        return next(moves, self.newest).text

    @property
    def path(self) -> tuple[str, ...]:
        """The states that it went through, the oldest first."""
        kinds = [event.kind for event in reversed(self.events) if event.kind in _STATES]
        return tuple(kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before)


@dataclass(frozen=True, slots=True)
class Burst:
    """Many jobs of one name; without a name, many nodes."""

    name: str | None
    lines: tuple[Line, ...]  # of each, the one that changed last first

    @property
    def newest(self) -> Event:
        return self.lines[0].newest

    @property
    def key(self) -> str:
        return f"burst-{self.name or 'of nodes'}"

    @property
    def counts(self) -> list[tuple[JobState, int]]:
        """How many of its jobs are in each state."""
        counts = Counter(line.state for line in self.lines)
        return [(state, counts[state]) for state in JobState if counts[state]]

    @property
    def named(self) -> tuple[Line, ...]:
        """The failed jobs first: somebody looks for them."""
        return tuple(sorted(self.lines, key=lambda line: line.state != JobState.FAILED)[:_MOST_NAMED])


def activity(happened: Iterable[Happened], most: int = MOST_LINES) -> list[Line | Burst]:
    """``happened``: the newest first."""
    lines = _lines(happened)
    sizes = Counter(map(_family, lines))
    folded: dict[object, list[Line]] = {}
    for line in lines:
        family = _family(line)
        folded.setdefault(family if sizes[family] >= BURST else line.key, []).append(line)
    return [_folded(some) for some in list(folded.values())[:most]]


def _lines(happened: Iterable[Happened]) -> list[Line]:
    found: dict[int | str | None, list[Happened]] = {}
    for one in happened:
        if one.event.kind in _HOUSEKEEPING:
            continue
        found.setdefault(one.event.job if one.event.job is not None else one.event.node, []).append(one)
    return [Line(tuple(one.event for one in some), some[0].name, some[0].state) for some in found.values()]


def _folded(lines: Sequence[Line]) -> Line | Burst:
    if len(lines) == 1:
        return lines[0]
    names = {line.name for line in lines}
    return Burst(names.pop() if len(names) == 1 else _family(lines[0])[1], tuple(lines))


def _family(line: Line) -> tuple[str, str | None]:
    """Lines that many make one: those of nodes, and of jobs whose names differ in a number at their end."""
    if line.name is None:
        return ("node", None) if line.job is None else ("removed job", str(line.job))
    return "job", _NUMBERED.sub("", line.name) or line.name
