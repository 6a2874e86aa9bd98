"""Code that is sent to nodes; and the results of a job: which files were collected, and which were left on nodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.features.planning.model import Forecast
from ugro.features.training.model import JobEnergy
from ugro.kernel.telemetry.model import MetricsSummary

# --- code that is sent to nodes ---------------------------------------------------------------------------------------


# What is not sent unless somebody says so: the default of sync.exclude_patterns.
EXCLUDED = (".git", "__pycache__", ".env", "*.pyc", "node_modules", ".next")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folder as it was when the job was submitted."""

    id: str
    folder: str
    files: int
    bytes: int
    skipped: tuple[str, ...] = ()  # files that are not sent although no pattern excludes them; one sentence each


@dataclass(frozen=True, slots=True)
class Travel:
    """One path that is sent to a node."""

    path: str
    bytes: int
    why: str  # new, changed, or missing: the node had it and lost it


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The progress or result of sending code to one node."""

    node: str
    state: str  # checking, sending, done, failed; or would (a preview)
    why: str = ""
    files: int = 0  # to send
    bytes: int = 0
    sent_bytes: int = 0  # so far
    wire_bytes: int = 0  # compressed, as sent
    seconds: float = 0.0
    travels: tuple[Travel, ...] = ()  # the largest first; truncated if there are very many
    error: str | None = None
    hint: str | None = None
    sent_files: int = 0  # complete so far
    bytes_per_s: float | None = None  # of the last seconds; None: not known yet


@dataclass(frozen=True, slots=True)
class SyncTotals:
    """Totals since the agent started, for the `ugro_sync_*` metrics."""

    syncs: int = 0
    unchanged: int = 0  # of these, those for which nothing had to be sent
    failed: int = 0
    duration_seconds: float = 0.0
    files: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    snapshots: int = 0
    snapshot_seconds: float = 0.0
    snapshot_files_read: int = 0


@dataclass(frozen=True, slots=True)
class Tidied:
    """The result of deleting unused code on a node, or here."""

    node: str | None  # None: this machine
    freed_bytes: int = 0
    kept_bytes: int = 0
    trees: int = 0
    error: str | None = None


def both(code: Tidied, folders: Tidied) -> Tidied:
    """Of one node, or of this machine."""
    return Tidied(
        code.node,
        code.freed_bytes + folders.freed_bytes,
        code.kept_bytes + folders.kept_bytes,
        code.trees + folders.trees,
        code.error or folders.error,
    )


# --- the results of a job ---------------------------------------------------------------------------------------------


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
