"""``ugro status``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import click

from ugro.cli import candidates
from ugro.cli.jobs import describe
from ugro.cli.jobs.document import job_document
from ugro.cli.output import Cell, Output
from ugro.cli.results.summary import result_facts
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.jobs import Details
from ugro.core.job import WAITING_STATES, Attempt, Job, JobSpec, JobState, places
from ugro.core.results import JobResults
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
        made = jobs.brief_results(details.job.id) if details.job.is_final else None
        _show(session.output, details, made)
    return 0


def _show_all(output: Output, jobs: list[Job]) -> None:
    if output.is_json:
        output.document({"jobs": [job_document(job) for job in jobs]})
    elif not jobs:
        output.note("no such jobs; try: ugro run -- hostname")
    else:
        now = datetime.now(UTC)
        output.table(_HEADER, [_row(output, job, now) for job in jobs], spare=_SPARE)


def _row(output: Output, job: Job, now: datetime) -> list[Cell]:
    sign, style = describe.SIGNS[job.state]
    seconds = describe.duration_s(job, now)
    return [
        Cell(sign, style),
        Cell(str(job.id), "bold", is_number=True),
        Cell(job.spec.name),
        Cell(job.state, style),
        Cell(_nodes(output, job)),
        Cell(str(describe.gpus(job) or ""), is_number=True),
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


def _show(output: Output, details: Details, made: JobResults | None) -> None:
    job = details.job
    sign, style = describe.SIGNS[job.state]
    output.raw(f"{output.styled(f'{sign} job {job.id} {job.spec.name} {job.state}', style)}\n".encode())
    for name, text in _facts(job):
        if text:
            output.text(f"  {name:<11}{text}")
    for attempt in details.attempts:
        for number, line in enumerate(_attempt(attempt, job)):
            output.text(f"  {line}" if number == 0 else f"    {line}")
    for name, text in result_facts(job, made) if made is not None else ():
        output.text(f"  {name:<11}{text}")
    failure = details.attempts[-1].failure if details.attempts else None
    output.text(f"  {'next':<11}{describe.next_commands(job, failure)}")


def _facts(job: Job) -> Iterator[tuple[str, str]]:
    spec = job.spec
    yield "why", job.reason
    yield "command", describe.command(spec.argv)
    yield "launcher", f"{spec.launcher}, {describe.ranks(job)} ranks" if describe.ranks(job) > 1 else ""
    yield "in", spec.cwd or ""
    yield "env", " ".join(describe.variables(spec.env))
    yield "on", places(job.placement)
    yield "priority", str(spec.priority) if spec.priority != JobSpec("", ()).priority else ""
    yield "submitted", f"{describe.local_time(job.submitted_at)} by {job.user}"
    yield "started", describe.local_time(job.started_at) if job.started_at else ""
    yield "ended", describe.local_time(job.ended_at) if job.ended_at else ""
    yield _what_time_is(job), format_duration(describe.duration_s(job))
    yield "exit code", "" if job.exit_code is None else str(job.exit_code)


def _what_time_is(job: Job) -> str:
    if job.is_final:
        return "took"
    return "waits for" if job.state in WAITING_STATES else "runs for"


def _attempt(attempt: Attempt, job: Job) -> Iterator[str]:
    took = describe.attempt_duration(attempt)
    state = attempt.outcome or (f"{job.state} now" if attempt.number == job.attempt else "")
    yield f"attempt {attempt.number}  {places(attempt.placement)}, {took}: {state}"
    if attempt.failure is not None:
        lines = list(describe.failure_lines(attempt.failure))
        yield from lines[int(attempt.failure.reason in (attempt.outcome or "")) :]
