"""``ugro status``, ``ugro why`` and ``ugro clone``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import click

from ugro.cli import candidates
from ugro.cli.jobs import text as words
from ugro.cli.jobs.document import job_document
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.jobs import Details
from ugro.core.job import WAITING_STATES, Attempt, Job, JobSpec, JobState, places
from ugro.core.support.quantity import format_duration

_STATES = [state.value for state in JobState]
_MOST_NODES = 3  # that a table names; the page of one job names all
_HEADER = ("", "JOB", "NAME", "STATE", "NODES", "GPUS", "TRY", "TIME", "USER", "REASON")
_SPARE = ("USER", "TRY", "GPUS")


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

    JOB is an id, a name, or last. In the list, TIME is how long a job has waited, has run, or took.

    \b
    Examples:
      ugro status --state running
      ugro status last
    """
    jobs = session.client().jobs
    if job is None:
        found = jobs.newest(None if is_all else limit, states=[JobState(word) for word in state])
        _show_all(session.output, found)
        return 0
    details = jobs.details(job)
    if session.output.is_json:
        session.output.document({"job": job_document(details.job, details.attempts)})
    else:
        _show(session.output, details)
    return 0


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
    text = session.client().jobs.file(job)
    if session.output.is_json:
        session.output.document({"file": text})
    else:
        session.output.text(text.removesuffix("\n"))


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@json_option
@pass_session
def why(session: Session, job: str) -> None:
    """Explain why a job waits, where it runs, or how it ended.

    For a waiting job: what it needs, which jobs hold that, and when it may start.
    """
    jobs = session.client().jobs
    details = jobs.details(job)
    found = details.job
    answer = jobs.why(found.id) if found.state in WAITING_STATES else None
    if session.output.is_json:
        session.output.document({"job": job_document(found, details.attempts), "why": answer})
        return
    if answer is None:
        lines = _outcome(details)
    else:
        lines = iter([f"job {found.id} {found.spec.name} is {found.state}: {answer['text']}", *answer["details"]])
        if found.state is JobState.RECOVERING:
            lines = iter([*lines, *_outcome(details)])
    for number, line in enumerate(lines):
        session.output.text(line if number == 0 else f"  {line}")


def _outcome(details: Details) -> Iterator[str]:
    job = details.job
    yield words.sentence(job)
    if job.placement is not None and not job.is_final:
        yield f"on {places(job.placement)}, for {format_duration(words.duration_s(job))}"
    failure = details.attempts[-1].failure if details.attempts else None
    if failure is not None:
        yield from list(words.failure_lines(failure))[int(failure.reason in job.reason) :]
    yield f"next: {words.next_commands(job, failure)}"


def _show_all(output: Output, jobs: list[Job]) -> None:
    if output.is_json:
        output.document({"jobs": [job_document(job) for job in jobs]})
    elif not jobs:
        output.note("no such jobs; try: ugro run -- hostname")
    else:
        now = datetime.now(UTC)
        output.table(_HEADER, [_row(output, job, now) for job in jobs], spare=_SPARE)


def _row(output: Output, job: Job, now: datetime) -> list[Cell]:
    sign, style = words.SIGNS[job.state]
    seconds = words.duration_s(job, now)
    return [
        Cell(sign, style),
        Cell(str(job.id), "bold", is_number=True),
        Cell(job.spec.name),
        Cell(job.state, style),
        Cell(_nodes(output, job)),
        Cell(str(words.gpus(job) or ""), is_number=True),
        Cell(str(job.attempt) if job.attempt > 1 or not output.is_terminal else "", is_number=True),
        Cell(format_duration(seconds) if output.is_terminal else f"{seconds:.3f}", is_number=True),
        Cell(job.user),
        Cell(job.reason),
    ]


def _nodes(output: Output, job: Job) -> str:
    nodes = job.placement.nodes if job.placement else ()
    if output.is_terminal and len(nodes) > _MOST_NODES:
        return f"{len(nodes)} nodes"
    return ",".join(nodes)


def _show(output: Output, details: Details) -> None:
    job = details.job
    sign, style = words.SIGNS[job.state]
    output.raw(f"{output.styled(f'{sign} job {job.id} {job.spec.name} {job.state}', style)}\n".encode())
    for name, text in _facts(job):
        if text:
            output.text(f"  {name:<11}{text}")
    for attempt in details.attempts:
        for number, line in enumerate(_attempt(attempt, job)):
            output.text(f"  {line}" if number == 0 else f"    {line}")
    failure = details.attempts[-1].failure if details.attempts else None
    output.text(f"  {'next':<11}{words.next_commands(job, failure)}")


def _facts(job: Job) -> Iterator[tuple[str, str]]:
    spec = job.spec
    yield "why", job.reason
    yield "command", words.command(spec.argv)
    yield "launcher", f"{spec.launcher}, {words.ranks(job)} ranks" if words.ranks(job) > 1 else ""
    yield "in", spec.cwd or ""
    yield "env", " ".join(words.variables(spec.env))
    yield "on", places(job.placement)
    yield "priority", str(spec.priority) if spec.priority != JobSpec("", ()).priority else ""
    yield "submitted", f"{words.local_time(job.submitted_at)} by {job.user}"
    yield "started", words.local_time(job.started_at) if job.started_at else ""
    yield "ended", words.local_time(job.ended_at) if job.ended_at else ""
    yield _what_time_is(job), format_duration(words.duration_s(job))
    yield "exit code", "" if job.exit_code is None else str(job.exit_code)


def _what_time_is(job: Job) -> str:
    if job.is_final:
        return "took"
    return "waits for" if job.state in WAITING_STATES else "runs for"


def _attempt(attempt: Attempt, job: Job) -> Iterator[str]:
    took = words.attempt_duration(attempt)
    state = attempt.outcome or (f"{job.state} now" if attempt.number == job.attempt else "")
    yield f"attempt {attempt.number}  {places(attempt.placement)}, {took}: {state}"
    if attempt.failure is not None:
        lines = list(words.failure_lines(attempt.failure))
        yield from lines[int(attempt.failure.reason in (attempt.outcome or "")) :]
