"""What can be asked about jobs as experiments: their notes, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ugro.features.experiments.model import Note
from ugro.features.experiments.rules.comparison import Row
from ugro.kernel.access.model import Role
from ugro.kernel.jobs.model import Job
from ugro.kernel.operations.request import Between, Kind, Request

_LONGEST = 100_000  # longer bodies are refused
_MOST_COMPARED = 20
_MOST_TAGS = 1000
Tags = Annotated[tuple[Annotated[str, Between(most=1000)], ...], Between(most=_MOST_TAGS)]


@dataclass(frozen=True, slots=True)
class FoundNote:
    note: Note


@dataclass(frozen=True, slots=True)
class GetJobNote(Request[FoundNote], route="GET /v1/jobs/{word}/notes", of=Kind.JOB):
    """Returns the note and the tags of a job."""

    word: str


@dataclass(frozen=True, slots=True)
class ChangeJobNote(
    Request[FoundNote], route="PUT /v1/jobs/{word}/notes", role=Role.USER, audit="note {word}",
    of=Kind.JOB, is_own=True, repeatable=True,
):  # fmt: skip
    """Changes the note and the tags of a job; what is left out stays as it is."""

    word: str
    text: Annotated[str, Between(most=_LONGEST)] | None = None
    tags: Tags | None = None  # all of them
    add: Tags = ()
    remove: Tags = ()


@dataclass(frozen=True, slots=True)
class JobComparison:
    jobs: tuple[Job, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class CompareJobs(Request[JobComparison], route="GET /v1/compare"):
    """Compares jobs, fact by fact: command, environment, code and results."""

    job: Annotated[tuple[str, ...], Between(2, _MOST_COMPARED)]
