"""What can be asked about jobs: submit, show, follow and end them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ugro.kernel.access.caller import OwnKey, SeenUser
from ugro.kernel.access.model import Role
from ugro.kernel.agent.model import Event
from ugro.kernel.jobs.model import Attempt, Folder, Job, JobState, Origin
from ugro.kernel.jobs.records import DryRun, Why
from ugro.kernel.operations.request import Between, Kind, Lines, Needs, Raw, Request

MOST_AT_ONCE = 10_000
_MOST_LISTED = 1000  # of one answer, during which the agent does nothing else
_LARGEST_ID = 1 << 62
_LATEST_S = 4e9  # a time of this century
_FRAMES = "application/vnd.ugro.frames"

# --- submitting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A job as a client sends it."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = Request.__pydantic_config__

    user: SeenUser
    key: OwnKey
    file: Path | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    here: Path = Path("/")  # the client's current directory
    env: Mapping[str, str] | None = None  # None: the client has not been asked for variables yet
    force: bool = False  # even if its code is very large
    origin: Origin | None = None
    as_options: bool = False  # errors name fields as options of a command, and not as keys of a job file


@dataclass(frozen=True, slots=True)
class Submitted:
    job: Job


@dataclass(frozen=True, slots=True)
class SubmitJob(
    Submit,
    Request[Submitted | Needs],
    route="POST /v1/jobs",
    role=Role.USER,
    audit="submit",
    repeatable=True,
    ends_with_client=True,
):
    """Submits a job, or asks for the values of the variables that it needs."""

    def about(self, answer: Submitted | Needs) -> str:
        return "" if isinstance(answer, Needs) else str(answer.job.id)


@dataclass(frozen=True, slots=True)
class SubmittedMany:
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class SubmitJobs(
    Request[SubmittedMany],
    route="POST /v1/jobs/batch",
    role=Role.USER,
    audit="submit",
    repeatable=True,
    ends_with_client=True,
):
    """Submits all of these jobs, or on an error none."""

    jobs: Annotated[tuple[Submit, ...], Between(most=MOST_AT_ONCE)]

    def about(self, answer: SubmittedMany) -> str:
        numbers = [job.id for job in answer.jobs]
        return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) if numbers else ""


@dataclass(frozen=True, slots=True)
class Planned:
    dry_run: DryRun


@dataclass(frozen=True, slots=True)
class PlanJob(Submit, Request[Planned | Needs], route="POST /v1/jobs/plan", role=Role.USER, repeatable=True):
    """Says what submitting the job now would do. Nothing is submitted."""


@dataclass(frozen=True, slots=True)
class FolderReading:
    """How much of a folder was read; of what was read before, nothing is read again."""

    reading: str
    bytes: int
    total: int


@dataclass(frozen=True, slots=True)
class FolderRead:
    folder: Folder


@dataclass(frozen=True, slots=True)
class ReadFolders(Submit, Request[Lines[FolderReading | FolderRead]], route="POST /v1/folders", role=Role.USER):
    """Reads the folders of a job that is submitted next, and says how far it is."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    job: Job | None  # if it was recorded before this request; None: it is not submitted any more


@dataclass(frozen=True, slots=True)
class WithdrawSubmission(
    Request[Withdrawn], route="DELETE /v1/submissions/{key}", role=Role.USER, audit="withdraw", repeatable=True
):
    """Withdraws a submission that was interrupted. If its job was recorded before, that job continues."""

    key: OwnKey


@dataclass(frozen=True, slots=True)
class RetryJob(
    Request[Job],
    route="POST /v1/jobs/{word}/retry",
    role=Role.USER,
    audit="retry {word}",
    of=Kind.JOB,
    is_own=True,
    repeatable=True,
):
    """Submits a job that has ended again: a new job with the same spec."""

    word: str
    key: OwnKey
    user: SeenUser
    exact: bool = False
    put_back: bool | None = None  # None: as the job was submitted

    def about(self, answer: Job) -> str:
        return f"{self.word} → {answer.id}"


@dataclass(frozen=True, slots=True)
class CancelJob(
    Request[Job],
    route="POST /v1/jobs/{word}/cancel",
    role=Role.USER,
    audit="cancel {word}",
    of=Kind.JOB,
    is_own=True,
    repeatable=True,
):
    """Cancels a job, which ends soon. One that has ended stays as it is."""

    word: str

    def about(self, answer: Job) -> str:
        return str(answer.id)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobList:
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class ListJobs(Request[JobList], route="GET /v1/jobs"):
    """Lists the newest jobs first."""

    limit: Annotated[int, Between(1, _MOST_LISTED)] = 50
    state: tuple[JobState, ...] = ()
    before: Annotated[int, Between(0, _LARGEST_ID - 1)] | None = None  # smaller numbers, for the next page


@dataclass(frozen=True, slots=True)
class Details:
    job: Job
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class GetJob(Request[Details], route="GET /v1/jobs/{word}", of=Kind.JOB):
    """Returns a job by number, by name (the newest of that name) or ``last``, with all its attempts."""

    word: str


@dataclass(frozen=True, slots=True)
class JobFile:
    file: str


@dataclass(frozen=True, slots=True)
class GetJobFile(Request[JobFile], route="GET /v1/jobs/{word}/file", of=Kind.JOB):
    """Returns a job as a job file, without values that look secret."""

    word: str


@dataclass(frozen=True, slots=True)
class ExplainJob(Request[Why], route="GET /v1/jobs/{word}/why", of=Kind.JOB):
    """Says why a job waits, and when it may start."""

    word: str


# --- following --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaitForJob(Request[Lines[Job]], route="GET /v1/jobs/{word}/wait", of=Kind.JOB):
    """Tells the job now and after each change, until it has ended or the time is over."""

    word: str
    timeout_s: Annotated[float, Between(0)] | None = None


@dataclass(frozen=True, slots=True)
class ListEvents(Request[Lines[Event]], route="GET /v1/events"):
    """Lists events, the oldest first; with ``follow`` until the client leaves."""

    after: int = 0
    job: str | None = None
    since: Annotated[float, Between(0, _LATEST_S)] | None = None  # seconds since the epoch
    follow: bool = False


@dataclass(frozen=True, slots=True)
class ReadJobLog(Request[Raw], route="GET /v1/jobs/{word}/log", of=Kind.JOB, media="text/plain"):
    """Returns the log of one rank as text; with ``follow`` until the job has ended. In brackets: what UGRO says."""

    word: str
    rank: Annotated[int, Between(0)] = 0
    attempt: Annotated[int, Between(1)] | None = None  # None: the newest, and with ``follow`` later ones
    tail: Annotated[int, Between(0)] | None = None
    follow: bool = False


@dataclass(frozen=True, slots=True)
class StreamJobLogs(Request[Raw], route="GET /v1/jobs/{word}/logs", of=Kind.JOB, media=_FRAMES):
    """Sends for each rank CALL with where it is, and OUT with its bytes; RESULT with the job, or ERROR."""

    word: str
    rank: tuple[Annotated[int, Between(0)], ...] = ()
    node: tuple[str, ...] = ()
    attempt: Annotated[int, Between(1)] | None = None
    from_attempt: Annotated[int, Between(1)] | None = None
    since: Annotated[float, Between(0, _LATEST_S)] | None = None  # seconds since the epoch
    tail: Annotated[int, Between(0)] | None = None
    follow: bool = False
    moves: bool = False
    at: tuple[str, ...] = ()  # ATTEMPT.RANK:OFFSET, where a disconnected client continues
