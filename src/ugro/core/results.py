"""What a job made, as far as it is home: which files, from which nodes, and what stayed there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.core.metrics import MetricsSummary


class ResultState(StrEnum):
    """Of one node's part, and of all together: the first of these that holds for any node."""

    WAITING = "waiting"  # something is in the way; it is tried again by itself
    LIVE = "live"  # the run goes on; what it writes comes as it is written
    COMING = "coming"
    HOME = "home"
    UNKNOWN = "unknown"  # the node cannot be asked whether there is anything
    NONE = "none"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class LeftFile:
    """One that is not here, and why."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeResults:
    """An attempt's part on one node."""

    node: str
    state: ResultState
    files: int = 0
    bytes: int = 0
    missing_files: int = 0
    missing_bytes: int = 0
    problem: str | None = None
    left: tuple[LeftFile, ...] = ()  # on the node
    left_count: int = 0
    unsendable: tuple[LeftFile, ...] = ()


@dataclass(frozen=True, slots=True)
class ResultFile:
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A file or folder here, and its name among the results; empty: what is in it stands among them itself."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class JobResults:
    """Of one attempt."""

    job: int  # whose files these are: of one that was not run, the job that did the same before
    attempt: int
    folder: str
    state: ResultState
    files: int
    bytes: int
    listed: tuple[ResultFile, ...]  # the first thousand
    nodes: tuple[NodeResults, ...]
    parts: tuple[Part, ...]
    metrics: MetricsSummary | None = None
    removed_at: str | None = None
