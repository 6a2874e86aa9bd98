"""What can be asked about how trainings run: headlines, profiles, traces, energy, and advice before a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.features.training.model import Headline, JobEnergy, JobProfile, TraceFile, TraceRequest
from ugro.kernel.access.model import Role
from ugro.kernel.jobs.model import Job
from ugro.kernel.operations.request import Between, Kind, Request
from ugro.kernel.telemetry.records import AttemptSteps

MOST_STEPS = 10_000
MOST_TRACED = 1000  # as node/runs/api.py has it
Attempt = Annotated[int, Between(1)]


@dataclass(frozen=True, slots=True)
class FoundProfile:
    job: Job
    profile: JobProfile


@dataclass(frozen=True, slots=True)
class GetJobProfile(Request[FoundProfile], route="GET /v1/jobs/{word}/profile", of=Kind.JOB):
    """Shows where the time of its newest steps goes."""

    word: str
    attempt: Attempt | None = None
    steps: Annotated[int, Between(1, MOST_STEPS)] | None = None


@dataclass(frozen=True, slots=True)
class FoundSteps:
    job: Job
    attempts: tuple[AttemptSteps, ...]


@dataclass(frozen=True, slots=True)
class GetJobSteps(Request[FoundSteps], route="GET /v1/jobs/{word}/steps", of=Kind.JOB, is_large=True):
    """Returns what was recorded of each step, by attempt; nothing if its script records none."""

    word: str


@dataclass(frozen=True, slots=True)
class TraceJob(
    Request[TraceRequest], route="POST /v1/jobs/{word}/trace", role=Role.USER, audit="trace {word}",
    of=Kind.JOB, is_own=True, repeatable=True,
):  # fmt: skip
    """Asks every rank of a running training to record its next steps."""

    word: str
    key: Annotated[str, Between(1, 64)]
    steps: Annotated[int, Between(1, MOST_TRACED)]


@dataclass(frozen=True, slots=True)
class FoundTraces:
    job: Job
    traces: tuple[TraceFile, ...]


@dataclass(frozen=True, slots=True)
class ListJobTraces(Request[FoundTraces], route="GET /v1/jobs/{word}/traces", of=Kind.JOB):
    """Lists the traces that have been collected."""

    word: str
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True)
class FoundHeadline:
    headline: Headline


@dataclass(frozen=True, slots=True)
class GetJobHeadline(Request[FoundHeadline], route="GET /v1/jobs/{word}/headline", of=Kind.JOB):
    """Says how far it is, how long it still takes, its loss, its speed, and the use of its devices."""

    word: str


@dataclass(frozen=True, slots=True)
class RunningHeadlines:
    headlines: tuple[Headline, ...]


@dataclass(frozen=True, slots=True)
class ListHeadlines(Request[RunningHeadlines], route="GET /v1/headlines"):
    """Lists the headlines of the newest running jobs."""


@dataclass(frozen=True, slots=True)
class FoundEnergy:
    energy: JobEnergy | None


@dataclass(frozen=True, slots=True)
class GetJobEnergy(Request[FoundEnergy], route="GET /v1/jobs/{word}/energy", of=Kind.JOB):
    """Says what its devices used, and what that costs; null if nothing was measured."""

    word: str


@dataclass(frozen=True, slots=True)
class FoundAdvice:
    note: str | None


@dataclass(frozen=True, slots=True)
class GetAdvice(Request[FoundAdvice], route="GET /v1/advice"):
    """Says who lacks what the job ``before`` imports, or what the last job of that name shows about using all nodes."""

    name: str
    before: int | None = None  # only jobs older than this one count
    node: tuple[str, ...] = ()
    least: Annotated[int, Between(1)] = 1  # nodes, unless some are named
    most: Annotated[int, Between(1)] = 1

    def is_on(self, nodes: tuple[str, ...]) -> bool:
        return set(nodes) == set(self.node) if self.node else self.least <= len(nodes) <= self.most
