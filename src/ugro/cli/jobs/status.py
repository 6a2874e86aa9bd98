"""``ugro status``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from ugro.cli import candidates
from ugro.cli.jobs import describe
from ugro.cli.jobs.document import job_document
from ugro.cli.jobs.result_summary import result_facts
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.jobs import Details
from ugro.core.energy import JobEnergy
from ugro.core.job import WAITING_STATES, Attempt, Job, JobSpec, JobState, places
from ugro.core.results import JobResults
from ugro.core.safe_mode import SafeMode
from ugro.core.support import clock
from ugro.core.support.moment import Instant
from ugro.core.support.quantity import format_duration

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
    details = jobs.details(job)
    energy = jobs.energy(details.job.id) if details.job.attempt else None
    if session.output.is_json:
        document = {**job_document(details.job, details.attempts), "energy": energy}
        session.output.document({"job": document, "safe_mode": session.safe_mode})
    else:
        made = jobs.brief_results(details.job.id) if details.job.is_final else None
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
