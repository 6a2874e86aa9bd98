"""The results of a job: which files were collected from which nodes, and which were left there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.core.energy import JobEnergy
from ugro.core.metrics import MetricsSummary
from ugro.core.planning import Forecast


class ResultState(StrEnum):
    """Of one node's part; for the whole job, the first of these that applies to any node."""

    WAITING = "waiting"  # a problem; retried automatically
    LIVE = "live"  # the run continues; files are collected as they are written
    COMING = "coming"
    HOME = "home"
    UNKNOWN = "unknown"  # the node cannot be reached to ask
    NONE = "none"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file that was not collected, and why."""

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
    left: tuple[LeftFile, ...] = ()  # on the node: the first thousand
    left_count: int = 0
    unsendable: tuple[LeftFile, ...] = ()
    left_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ResultFile:
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A file or folder here, and its name among the results; empty: its content is listed directly."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class JobResults:
    """The results of one attempt."""

    job: int  # whose files these are; for a cached job, the job that ran
    attempt: int
    folder: str
    state: ResultState
    files: int
    bytes: int
    listed: tuple[ResultFile, ...]  # the first thousand, unless all were asked for
    nodes: tuple[NodeResults, ...]
    parts: tuple[Part, ...]
    metrics: MetricsSummary | None = None
    removed_at: str | None = None
    left_before: tuple[int, ...] = ()  # earlier attempts that left files on their nodes
    energy: JobEnergy | None = None  # None: nothing was measured
    forecast: Forecast | None = None  # what was predicted when the job was submitted

    @property
    def left_count(self) -> int:
        """How many files are still on the nodes."""
        return sum(node.left_count for node in self.nodes)

    @property
    def left_bytes(self) -> int:
        return sum(node.left_bytes for node in self.nodes)
