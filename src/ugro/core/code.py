"""Code on its way to the nodes, as clients see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folder as it was when it was submitted."""

    id: str
    folder: str
    files: int
    bytes: int
    skipped: tuple[str, ...] = ()  # what stays at home though no pattern says so; one sentence each


@dataclass(frozen=True, slots=True)
class Travel:
    """One path that a node lacks."""

    path: str
    bytes: int
    why: str  # new, changed, or missing: the node had it, and has it no more


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What became of one node, or what has so far."""

    node: str
    state: str  # checking, sending, done, failed; or would: only asked
    why: str = ""
    files: int = 0  # that travel
    bytes: int = 0
    sent_bytes: int = 0  # so far
    wire_bytes: int = 0  # as they were sent
    seconds: float = 0.0
    travels: tuple[Travel, ...] = ()  # the largest first; not all of very many
    error: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class SyncTotals:
    """Since the agent started; what `ugro_sync_*` metrics are made of."""

    syncs: int = 0
    unchanged: int = 0  # of them, those for which nothing had to travel
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
    """What tidying up left on a node, or here."""

    node: str | None  # None: this machine
    freed_bytes: int = 0
    kept_bytes: int = 0
    trees: int = 0
    error: str | None = None
