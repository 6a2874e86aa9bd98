"""Code that is sent to nodes, as clients see it."""

from __future__ import annotations

from dataclasses import dataclass

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
