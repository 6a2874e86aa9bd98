"""What can be asked about code on nodes, and about the results of jobs.

The name of a result file is quoted as in a URL: it need not be text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.kernel.access.model import Role
from ugro.kernel.files.model import JobResults, Snapshot, SyncReport, SyncTotals, Tidied
from ugro.kernel.jobs.model import Job
from ugro.kernel.operations.request import Between, Kind, Lines, Raw, Request

_MOST_PATTERNS = 1000
_MOST_FILES = 1000  # in one request

# --- code -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SyncReading:
    reading: str  # while it takes its time


@dataclass(frozen=True, slots=True)
class SyncTaken:
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class SyncSent:
    node: SyncReport


Synced = SyncReading | SyncTaken | SyncSent


@dataclass(frozen=True, slots=True)
class SyncCode(Request[Lines[Synced]], route="POST /v1/sync", role=Role.USER, audit="sync {folder} {nodes}"):
    """Sends a folder's code to nodes: tells the snapshot, then reports until every node is done, failed or would."""

    folder: str
    nodes: tuple[str, ...] = ()  # none: all
    dry_run: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class GetSyncTotals(Request[SyncTotals], route="GET /v1/sync"):
    """Returns what was transferred since the agent started."""


@dataclass(frozen=True, slots=True)
class TidiedNodes:
    tidied: tuple[Tidied, ...]


@dataclass(frozen=True, slots=True)
class RemoveUnusedCode(
    Request[TidiedNodes], route="POST /v1/tidy", role=Role.OPERATOR, audit="remove unused code {nodes}"
):
    """Removes unused code above the limit, on the nodes and here; or all unused code."""

    nodes: tuple[str, ...] = ()
    everything: bool = False


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResultsOfJob:
    job: Job
    results: JobResults


@dataclass(frozen=True, slots=True)
class GetJobResults(Request[ResultsOfJob], route="GET /v1/jobs/{word}/results", of=Kind.JOB):
    """Returns the results of the newest attempt or of another, with the names of 1,000 files or of all."""

    word: str
    attempt: Annotated[int, Between(1)] | None = None
    all_files: bool = False


@dataclass(frozen=True, slots=True)
class BriefResults:
    results: JobResults


@dataclass(frozen=True, slots=True)
class GetBriefJobResults(Request[BriefResults], route="GET /v1/jobs/{word}/results/brief", of=Kind.JOB):
    """Counts the files here and on the nodes, without their names. Asks no node."""

    word: str


@dataclass(frozen=True, slots=True)
class FetchJobResults(
    Request[ResultsOfJob],
    route="POST /v1/jobs/{word}/results/fetch",
    role=Role.USER,
    audit="fetch results {word}",
    of=Kind.JOB,
    is_own=True,
    repeatable=True,
):
    """Begins to fetch files that were left on the nodes: all, or those that match. The results say how far it is."""

    word: str
    patterns: Annotated[tuple[str, ...], Between(most=_MOST_PATTERNS)] = ()
    attempt: Annotated[int, Between(1)] | None = None


@dataclass(frozen=True, slots=True)
class DeletedResults:
    job: Job
    problems: tuple[str, ...]  # what failed


@dataclass(frozen=True, slots=True)
class DeleteJobResults(
    Request[DeletedResults],
    route="DELETE /v1/jobs/{word}/results",
    role=Role.USER,
    audit="delete results {word}",
    of=Kind.JOB,
    is_own=True,
    repeatable=True,
):
    """Deletes the results here and on the nodes. The logs stay."""

    word: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    name: str
    bytes: int
    mode: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class ListResultFiles(Request[Lines[FileEntry]], route="GET /v1/jobs/{word}/results/files", of=Kind.JOB):
    """Lists the files of a job's results."""

    word: str
    attempt: Annotated[int, Between(1)] | None = None


@dataclass(frozen=True, slots=True)
class WantedFile:
    name: Annotated[str, Between(most=16384)]
    offset: Annotated[int, Between(0)] = 0  # bytes that the client has


@dataclass(frozen=True, slots=True)
class ReadResultFiles(
    Request[Raw],
    route="POST /v1/jobs/{word}/results/content",
    of=Kind.JOB,
    media="application/vnd.ugro.frames",
):
    """Sends for each file CALL with its name, OUT with its bytes, RESULT with its hash; or ERROR."""

    word: str
    files: Annotated[tuple[WantedFile, ...], Between(most=_MOST_FILES)]
    attempt: Annotated[int, Between(1)] | None = None
    only_hash: bool = False
