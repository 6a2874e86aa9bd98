"""What can be asked about sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ugro.features.sweeps.model import Importance, SweepReport
from ugro.kernel.access.caller import OwnKey, SeenUser
from ugro.kernel.access.model import Role
from ugro.kernel.jobs.model import Job
from ugro.kernel.operations.request import Between, Kind, Lines, Request

_MOST = 1_000_000
Count = Annotated[int, Between(1, _MOST)]


@dataclass(frozen=True, slots=True)
class SweepList:
    sweeps: tuple[SweepReport, ...]


@dataclass(frozen=True, slots=True)
class ListSweeps(Request[SweepList], route="GET /v1/sweeps"):
    """Lists sweeps, the newest first."""

    limit: Annotated[int, Between(1, 1000)] = 50


@dataclass(frozen=True, slots=True)
class FoundSweep:
    sweep: SweepReport


@dataclass(frozen=True, slots=True)
class GetSweep(Request[FoundSweep], route="GET /v1/sweeps/{word}", of=Kind.SWEEP):
    """Returns a sweep, by number or name; with ``history``, all values of its trials' metric."""

    word: str
    history: bool = False


@dataclass(frozen=True, slots=True)
class SweepDocument:
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GetSweepDocument(Request[SweepDocument], route="GET /v1/sweeps/{word}/document", of=Kind.SWEEP):
    """Returns what it searches, as its file has it; values of variables are for its user alone."""

    word: str


@dataclass(frozen=True, slots=True)
class WatchSweep(Request[Lines[SweepReport]], route="GET /v1/sweeps/{word}/watch", of=Kind.SWEEP):
    """Sends the sweep now and after each change, until it is over."""

    word: str


@dataclass(frozen=True, slots=True)
class SweepImportance:
    importance: tuple[Importance, ...]


@dataclass(frozen=True, slots=True)
class GetImportance(Request[SweepImportance], route="GET /v1/sweeps/{word}/importance", of=Kind.SWEEP):
    """Says how much of the differences between trials each parameter explains, the most first."""

    word: str


@dataclass(frozen=True, slots=True)
class StopSweep(
    Request[FoundSweep], route="POST /v1/sweeps/{word}/stop", role=Role.USER, audit="stop sweep {word}",
    of=Kind.SWEEP, is_own=True, repeatable=True,
):  # fmt: skip
    """Ends its trials and starts no more."""

    word: str


@dataclass(frozen=True, slots=True)
class ResumeSweep(
    Request[FoundSweep], route="POST /v1/sweeps/{word}/resume", role=Role.USER, audit="resume sweep {word}",
    of=Kind.SWEEP, is_own=True, repeatable=True,
):  # fmt: skip
    """Continues it; what is null stays as before."""

    word: str
    trials: Count | None = None  # the most in all
    parallel: Count | None = None


@dataclass(frozen=True, slots=True)
class LaunchedBest:
    job: Job


@dataclass(frozen=True, slots=True)
class LaunchBestOfSweep(
    Request[LaunchedBest], route="POST /v1/sweeps/{word}/launch", role=Role.USER, audit="launch best of sweep {word}",
    of=Kind.SWEEP, is_own=True, repeatable=True,
):  # fmt: skip
    """Submits the settings of the best trial as a job. The same key is the same job."""

    word: str
    user: SeenUser
    key: OwnKey

    def about(self, answer: LaunchedBest) -> str:
        return f"{self.word} → {answer.job.id}"
