"""``ugro status``, ``why``, ``wait``, ``cancel`` and ``clone``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import click

from ugro.cli import candidates
from ugro.cli.jobs import describe
from ugro.cli.jobs.describe import exit_code, sentence
from ugro.cli.jobs.document import job_document, result_facts, result_lines
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.features.safe_mode.model import SafeMode
from ugro.features.training.model import JobEnergy
from ugro.features.training.operations import GetJobEnergy
from ugro.kernel.access.operations import GetWhoami
from ugro.kernel.files.model import JobResults
from ugro.kernel.files.operations import GetBriefJobResults
from ugro.kernel.jobs.model import FINAL_STATES, WAITING_STATES, Attempt, Job, JobSpec, JobState, places
from ugro.kernel.jobs.operations import CancelJob, Details, ExplainJob, GetJob, GetJobFile
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import TimedOut, UsageError
from ugro.kernel.support.moments import Instant
from ugro.kernel.support.quantities import format_duration, parse_duration

# --- cancel -----------------------------------------------------------------------------------------------------------
# ``ugro cancel``.


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=candidates.live_jobs)
@click.option("--all", "-a", "is_all", is_flag=True, help="Cancel all your jobs.")
@json_option
@pass_session
def cancel(session: Session, jobs: tuple[str, ...], is_all: bool) -> None:
    """Stop jobs and all their processes.

    Jobs that have already ended are not changed.

    \b
    Examples:
      ugro cancel last
      ugro cancel --all
    """
    if bool(jobs) == is_all:
        raise UsageError("name the jobs, or use --all", hint="for example: ugro cancel last")
    client = session.client()
    chosen = [str(job.id) for job in _mine(client)] if is_all else jobs
    found = [client.ask(CancelJob(job)) for job in chosen]
    if session.output.is_json:
        session.output.document({"jobs": [job_document(job) for job in found]})
    for job in found:
        text = f"has already ended: {job.state}" if job.is_final else "is stopping"
        session.output.note(f"job {job.id} {job.spec.name} {text}")
    if not found:
        session.output.note("you have no waiting or running jobs")


def _mine(client: Client) -> list[Job]:
    states = [state for state in JobState if state not in FINAL_STATES]
    me = client.ask(GetWhoami()).user
    return [job for job in client.jobs.newest(None, states=states) if job.user == me]


# --- clone ------------------------------------------------------------------------------------------------------------
# ``ugro clone``.


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@json_option
@pass_session
def clone(session: Session, job: str) -> None:
    """Print a job as a job file, to edit and submit again.

    Submit it in the folder of its code. Environment variables that look secret have no value in it: give them when you
    submit.

    \b
    Example:
      ugro clone 12 > job.yaml && ugro launch -f job.yaml
    """
    text = session.client().ask(GetJobFile(job)).file
    if session.output.is_json:
        session.output.document({"file": text})
    else:
        session.output.block(text.removesuffix("\n"))


# --- status -----------------------------------------------------------------------------------------------------------


_STATES = [state.value for state in JobState]
_MOST_NODES = 3  # that a table names; the page of one job names all
_HEADER = ("", "JOB", "NAME", "STATE", "NODES", "GPUS", "TRY", "STARTED", "TIME", "USER")
_SPARE = ("USER", "TRY", "GPUS")
# Without a terminal, for programs: columns are added at the end.
_FIELDS = ("JOB", "NAME", "STATE", "NODES", "GPUS", "TRY", "TIME", "USER", "REASON", "SUBMITTED", "STARTED", "ENDED")


@click.command()
@click.argument("job", required=False, shell_complete=candidates.jobs)
@click.option(
    "--limit",
    "-n",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    default=20,
    show_default=True,
    help="Show the N newest jobs.",
)
@click.option("--all", "-a", "is_all", is_flag=True, help="Show all jobs.")
@click.option("--state", type=click.Choice(_STATES), multiple=True, help="Show only this state. May be repeated.")
@json_option
@pass_session
def status(session: Session, job: str | None, limit: int, is_all: bool, state: tuple[str, ...]) -> int:
    """List jobs, or show one.

    JOB is an id, a name, or last. In the list, TIME is how long a job has waited, has run, or took. Below a job that
    waits or has failed stands why.

    \b
    Examples:
      ugro status --state running
      ugro status last
    """
    client = session.client()
    jobs = client.jobs
    if client.is_elsewhere:
        session.output.note(f"on {client.master}")
    if job is None:
        found = jobs.newest(None if is_all else limit, states=[JobState(word) for word in state])
        show_all(session.output, found, state, session.safe_mode)
        return 0
    details = client.ask(GetJob(job))
    energy = client.ask(GetJobEnergy(str(details.job.id))).energy if details.job.attempt else None
    if session.output.is_json:
        document = {**job_document(details.job, details.attempts), "energy": energy}
        session.output.document({"job": document, "safe_mode": session.safe_mode})
    else:
        made = client.ask(GetBriefJobResults(str(details.job.id))).results if details.job.is_final else None
        show(session.output, details, made, energy)
    return 0


def show_all(output: Output, jobs: list[Job], states: Sequence[str] = (), safe_mode: SafeMode | None = None) -> None:
    """``states``: those that were asked for, if not all."""
    if output.is_json:
        output.document({"jobs": [job_document(job) for job in jobs], "safe_mode": safe_mode})
    elif not jobs:
        output.note(f"no job is {' or '.join(states)}" if states else "no jobs yet; try: ugro run -- hostname")
    elif output.is_terminal:
        output.drawn(table(output, jobs, clock.now()))
    else:
        now = clock.now()
        output.table(_FIELDS, [_fields(job, now) for job in jobs])


def table(output: Output, jobs: list[Job], now: Instant) -> list[str]:
    """For people."""
    below = [Cell(describe.news(job), "bad" if job.state is JobState.FAILED else "dim") for job in jobs]
    return output.table_lines(_HEADER, [_row(job, now) for job in jobs], spare=_SPARE, below=below)


def _row(job: Job, now: Instant) -> list[Cell]:
    sign, style = describe.SIGNS[job.state]
    nodes = job.placement.node_names if job.placement else ()
    return [
        Cell(sign, style),
        Cell(str(job.id), "bold", is_number=True),
        Cell(job.spec.name),
        Cell(job.state, style),
        Cell(f"{len(nodes)} nodes" if len(nodes) > _MOST_NODES else ",".join(nodes)),
        Cell(str(describe.gpus(job) or ""), is_number=True),
        Cell(str(job.attempt) if job.attempt > 1 else "", is_number=True),
        Cell(describe.ago(job.started, now) if job.started else "", is_number=True),
        Cell(format_duration(describe.duration_s(job, now)), is_number=True),
        Cell(job.user),
    ]


def _fields(job: Job, now: Instant) -> list[Cell]:
    values = (
        job.id, job.spec.name, job.state, ",".join(job.placement.node_names if job.placement else ()),
        describe.gpus(job) or "", job.attempt, f"{describe.duration_s(job, now):.3f}", job.user, job.reason,
        job.submitted_at, job.started_at or "", job.ended_at or "",
    )  # fmt: skip
    return [Cell(str(value)) for value in values]


def show(
    output: Output, details: Details, made: JobResults | None = None, energy: JobEnergy | None = None
) -> None:
    job = details.job
    sign, style = describe.SIGNS[job.state]
    output.raw(f"{output.styled(f'{sign} job {job.id} {job.spec.name} {job.state}', style)}\n".encode())
    output.drawn(output.wrapped(describe.news(job), " " * 13, f"  {'why':<11}"))
    for name, text in _facts(job):
        if text:
            output.text(f"  {name:<11}{text}")
    if energy is not None:
        output.text(f"  {'energy':<11}{energy.words}")
    for attempt in details.attempts:
        for number, line in enumerate(_attempt(attempt, job)):
            if line.startswith("  |"):  # what a program wrote stays as it is
                output.text(f"    {line}")
            else:
                output.drawn(output.wrapped(line, " " * 6, "  " if number == 0 else "    "))
    for name, text in result_facts(job, made) if made is not None else ():
        output.text(f"  {name:<11}{text}")
    failure = details.attempts[-1].failure if details.attempts else None
    output.text(f"  {'next':<11}{describe.next_commands(job, failure)}")


def _facts(job: Job) -> Iterator[tuple[str, str]]:
    spec, now = job.spec, clock.now()
    yield "command", describe.command(spec.argv)
    yield "launcher", f"{spec.launcher}, {describe.ranks(job)} ranks" if describe.ranks(job) > 1 else ""
    yield "in", spec.cwd or ""
    yield "env", " ".join(describe.variables(spec.env))
    yield "on", places(job.placement)
    yield "priority", str(spec.priority) if spec.priority != JobSpec("", ()).priority else ""
    yield "submitted", f"{_when(job.submitted, now)} by {job.user}"
    yield "started", _when(job.started, now) if job.started else ""
    yield "ended", _when(job.ended, now) if job.ended else ""
    yield _what_time_is(job), format_duration(describe.duration_s(job))
    yield "exit code", "" if job.exit_code is None else str(job.exit_code)


def _when(at: Instant, now: Instant) -> str:
    words, time = describe.ago(at, now), describe.local_time(at.at)
    return f"{time} ({words})" if words[-3:] in ("ago", "now") else time


def _what_time_is(job: Job) -> str:
    if job.is_final:
        return "took"
    return "waits for" if job.state in WAITING_STATES else "runs for"


def _attempt(attempt: Attempt, job: Job) -> Iterator[str]:
    took = describe.attempt_duration(attempt)
    state = attempt.outcome or (f"{job.state} now" if attempt.number == job.attempt else "")
    if attempt.number == job.attempt and (job.state is JobState.SUCCEEDED or state == job.reason):
        state = job.state  # why stands at the top
    yield f"attempt {attempt.number}  {places(attempt.placement)}, {took}: {state}"
    if attempt.failure is not None:
        lines = list(describe.failure_lines(attempt.failure))
        yield from lines[int(attempt.failure.reason in (attempt.outcome or "")) :]


# --- wait -------------------------------------------------------------------------------------------------------------
# ``ugro wait``.


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=candidates.live_jobs)
@click.option("--timeout", metavar="TIME", help="Give up after this time, such as 10m, with exit code 124.")
@json_option
@pass_session
def wait(session: Session, jobs: tuple[str, ...], timeout: str | None) -> int:
    """Wait until jobs have ended.

    Waits for all JOBs (default: the last job). Returns 0 if all succeeded, else the exit code of the first that failed.

    \b
    Example:
      ugro wait 12 13 --timeout 2h
    """
    client = session.client()
    deadline = time.monotonic() + (_seconds(timeout) if timeout else float("inf"))
    # Resolved before waiting: another job may soon be the last one, or have this name.
    numbers = [client.jobs.get(job).id for job in jobs or ("last",)]
    ended = [_wait(session.output, client, number, deadline) for number in dict.fromkeys(numbers)]
    if session.output.is_json:
        session.output.document({"jobs": [job_document(job) for job in ended]})
    for job in ended:
        session.output.note(sentence(job))
    failed = [job for job in ended if job.state is not JobState.SUCCEEDED]
    return exit_code(min(failed, key=lambda job: job.ended_at or "")) if failed else 0


def _wait(output: Output, client: Client, number: int, deadline: float) -> Job:
    left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
    job: Job | None = None
    for job in client.jobs.moves(number, timeout_s=left_s):
        output.progress(sentence(job))
    if job is None:
        raise TimedOut(f"no report about job {number}")
    return job


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--timeout: {error}") from error


# --- why --------------------------------------------------------------------------------------------------------------
# ``ugro why``.


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@json_option
@pass_session
def why(session: Session, job: str) -> None:
    """Explain why a job waits, where it runs, or how it ended.

    For a waiting job: what it needs, which jobs hold that, and when it may start.
    """
    client = session.client()
    details = client.ask(GetJob(job))
    found = details.job
    answer = client.ask(ExplainJob(str(found.id))) if found.state in WAITING_STATES else None
    if session.output.is_json:
        document = {"job": job_document(found, details.attempts), "why": answer, "safe_mode": session.safe_mode}
        session.output.document(document)
        return
    if answer is None:
        made = client.ask(GetBriefJobResults(str(found.id))).results if found.is_final else None
        lines = iter([*_outcome(details), *(result_lines(found, made) if made is not None else ())])
    else:
        lines = iter([f"job {found.id} {found.spec.name} is {found.state}: {answer.text}", *answer.details])
        if found.state is JobState.RECOVERING:
            lines = iter([*lines, *_outcome(details)])
    for number, line in enumerate(lines):
        session.output.text(line if number == 0 else f"  {line}")


def _outcome(details: Details) -> Iterator[str]:
    job = details.job
    yield describe.sentence(job)
    if job.held is not None:
        yield f"on {places(job.held)}, for {format_duration(describe.duration_s(job))}"
    failure = details.attempts[-1].failure if details.attempts else None
    if failure is not None:
        yield from list(describe.failure_lines(failure))[int(failure.reason in job.reason) :]
    yield f"next: {describe.next_commands(job, failure)}"
