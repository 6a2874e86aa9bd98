"""Jobs, from submit to end: ``run``, ``launch``, ``status``, ``logs``, ``wait``, ``cancel``, ``why``, ``events``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import Session, json_option, pass_session
from ugro.client import Client
from ugro.core.errors import UsageError
from ugro.core.job import Job, JobState

F = TypeVar("F", bound=Callable[..., Any])
_SIGNS: dict[JobState, tuple[str, Style]] = {
    JobState.QUEUED: ("…", "dim"),
    JobState.STARTING: ("▷", "id"),
    JobState.RUNNING: ("▶", "id"),
    JobState.UNREACHABLE: ("?", "warn"),
    JobState.STOPPING: ("■", "warn"),
    JobState.RECOVERING: ("↻", "warn"),
    JobState.SUCCEEDED: ("✓", "good"),
    JobState.FAILED: ("✗", "bad"),
    JobState.CANCELLED: ("-", "dim"),
}
_OPTIONS = (
    click.option("--name", help="What to call it; default: after its script or program."),
    click.option("--nodes", help="How many nodes: 3, or 2..4."),
    click.option("--gpus-per-node", help="How many GPUs of each node: a number, or all."),
    click.option("--gpu-memory", help="Least memory of a GPU, such as 8GB."),
    click.option("--gpu-model", multiple=True, help="A word of the GPU's name; may be repeated."),
    click.option("--cpus", help="Cores on each node."),
    click.option("--memory", help="Memory on each node, such as 16GB."),
    click.option("--label", multiple=True, help="Only nodes that carry it; may be repeated."),
    click.option("--priority", help="urgent, normal, batch, or 0 to 100."),
    click.option("--time-limit", help="End it after this long, such as 12h."),
    click.option("--after", multiple=True, help="Start when this job has succeeded; may be repeated."),
    click.option("--retries", help="Try again so often when its program fails."),
    click.option("--env", "-e", multiple=True, metavar="KEY[=VALUE]", help="Add to its environment; may be repeated."),
    click.option("--cwd", help="Where to run it on the nodes; default: a folder of its own."),
    click.option("--detach", "-d", is_flag=True, help="Do not wait for it."),
)


def _job_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_job_options
@click.argument("command", nargs=-1, required=True)
@json_option
@pass_session
def run(session: Session, /, command: tuple[str, ...], detach: bool, **fields: Any) -> int:
    """Run COMMAND as a job on the best node, show its output, and return its exit code.

    Ctrl-C detaches: the job goes on.
    """
    return _submit(session, None, {**fields, "command": list(command)}, detach)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A job file (see docs/jobs.md).")
@click.option("--launcher", help="ddp, torchrun or command.")
@_job_options
@click.argument("script", required=False)
@click.argument("args", nargs=-1)
@json_option
@pass_session
def launch(session: Session, /, file: Path | None, script: str | None, args: tuple[str, ...], **fields: Any) -> int:
    """Launch SCRIPT with torchrun's environment on every device, on as many nodes as asked for.

    The output of rank 0 is shown; Ctrl-C detaches, and the job goes on.
    """
    if (file is None) == (script is None):
        raise UsageError("a script or a job file is needed", hint="ugro launch train.py --nodes 3, or -f job.yaml")
    detach = bool(fields.pop("detach"))
    given = {"script": script, "args": list(args)} if script else {}
    return _submit(session, file, {**fields, **given}, detach)


@click.command()
@click.argument("job", required=False)
@click.option("-n", "--limit", type=click.IntRange(1, 10000), default=20, help="How many of the newest (20).")
@json_option
@pass_session
def status(session: Session, job: str | None, limit: int) -> int:
    """Show the newest jobs, or one JOB: an id, a name, or last."""
    jobs = session.client().jobs
    if job is None:
        _show_all(session.output, jobs.newest(limit))
        return 0
    found = jobs.get(job)
    if session.output.is_json:
        session.output.document({"job": found})
    else:
        _show(session.output, found)
    return 0


@click.command()
@click.argument("job", default="last")
@click.option("--rank", type=click.IntRange(0), help="Only this rank.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@pass_session
def logs(session: Session, job: str, rank: int | None, follow: bool) -> int:
    """Print what the ranks of JOB wrote, each line with its rank when there are several."""
    client = session.client()
    has_prefix = rank is None and _ranks(client.jobs.get(job)) > 1
    _print_logs(session.output, client, job, rank, follow=follow, has_prefix=has_prefix)
    return 0


@click.command()
@click.argument("job", default="last")
@json_option
@pass_session
def wait(session: Session, job: str) -> int:
    """Wait until JOB has ended; returns its exit code."""
    found = session.client().jobs.get(job)
    for found in session.client().jobs.moves(job):
        session.output.progress(f"job {found.id} is {found.state}: {found.reason}")
    if session.output.is_json:
        session.output.document({"job": found})
    session.output.note(_sentence(found))
    return found.exit_code or 0


@click.command()
@click.argument("jobs", nargs=-1, required=True)
@json_option
@pass_session
def cancel(session: Session, jobs: tuple[str, ...]) -> None:
    """End JOBS, with every process they started."""
    found = [session.client().jobs.cancel(job) for job in jobs]
    if session.output.is_json:
        session.output.document({"jobs": found})
    for job in found:
        session.output.note(_sentence(job) if job.is_final else f"job {job.id} is being ended")


@click.command()
@click.argument("job", default="last")
@json_option
@pass_session
def why(session: Session, job: str) -> None:
    """Say what JOB waits for, who holds it, and when it may start; or how it ended."""
    found = session.client().jobs.get(job)
    answer = session.client().jobs.why(job) if found.state in (JobState.QUEUED, JobState.RECOVERING) else None
    if session.output.is_json:
        session.output.document({"job": found, "why": answer})
        return
    session.output.text(f"job {found.id} {found.spec.name} is {found.state}: {found.reason}")
    if answer is not None:
        session.output.text(str(answer["reason"]))
        for line in answer.get("details", ()):
            session.output.text(f"  {line}")


@click.command()
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on as things happen, until Ctrl-C.")
@json_option
@pass_session
def events(session: Session, job: str | None, follow: bool) -> None:
    """Print what happened, oldest first."""
    for event in session.client().jobs.events(job=job, follow=follow):
        if session.output.is_json:
            session.output.document(event)
        else:
            about = f"job {event.job}.{event.attempt}" if event.job is not None else event.node or ""
            session.output.text(f"{event.at}  {about:<12}  {event.kind:<12}  {event.text}")


def _submit(session: Session, file: Path | None, fields: dict[str, Any], detach: bool) -> int:
    client = session.client()
    job = client.jobs.submit(file, fields={key: value for key, value in fields.items() if value})
    if detach or session.output.is_json:
        if session.output.is_json:
            session.output.document({"job": job})
        session.output.note(f"job {job.id} {job.spec.name} is {job.state}; follow it: ugro logs {job.id} -f")
        return 0
    try:
        return _attend(session.output, client, job)
    except KeyboardInterrupt:
        session.output.note(f"job {job.id} goes on; follow it: ugro logs {job.id} -f; end it: ugro cancel {job.id}")
        return 130


def _attend(output: Output, client: Client, job: Job) -> int:
    output.note(f"job {job.id} {job.spec.name} is {job.state}")
    _print_logs(output, client, str(job.id), 0, follow=True, has_prefix=False)
    ended = client.jobs.wait(job.id)
    if ended.state is not JobState.SUCCEEDED:
        output.note(_sentence(ended))
    return ended.exit_code or 0


def _print_logs(output: Output, client: Client, job: str, rank: int | None, *, follow: bool, has_prefix: bool) -> None:
    rest: dict[int, bytes] = {}
    for at, content in client.jobs.logs(job, rank=rank, follow=follow):
        if not has_prefix:
            output.raw(content)
            continue
        *whole, rest[at] = (rest.get(at, b"") + content).split(b"\n")
        output.raw(b"".join(_prefix(output, at) + line + b"\n" for line in whole))
    output.raw(b"".join(_prefix(output, at) + line + b"\n" for at, line in sorted(rest.items()) if line))
    sys.stdout.flush()


def _prefix(output: Output, rank: int) -> bytes:
    return output.styled(f"rank {rank} | ", "id").encode()


def _show_all(output: Output, jobs: list[Job]) -> None:
    if output.is_json:
        output.document({"jobs": jobs})
        return
    if not jobs:
        output.note("no jobs yet; begin with: ugro run -- hostname")
        return
    header = ("", "JOB", "NAME", "STATE", "USER", "NODES", "ATTEMPT", "REASON")
    output.table(header, [_row(job) for job in jobs])


def _row(job: Job) -> list[Cell]:
    sign, style = _SIGNS[job.state]
    nodes = ", ".join(job.placement.nodes) if job.placement else ""
    return [
        Cell(sign, style),
        Cell(str(job.id), "bold", is_number=True),
        Cell(job.spec.name),
        Cell(job.state, style),
        Cell(job.user),
        Cell(nodes),
        Cell(str(job.attempt or ""), is_number=True),
        Cell(job.reason),
    ]


def _show(output: Output, job: Job) -> None:
    output.text(f"job {job.id} {job.spec.name}  {job.state}")
    details = {
        "why": job.reason,
        "command": " ".join(job.spec.argv),
        "nodes": ", ".join(job.placement.nodes) if job.placement else "",
        "attempt": str(job.attempt or ""),
        "submitted": f"{job.submitted_at} by {job.user}",
        "started": job.started_at or "",
        "ended": job.ended_at or "",
        "exit code": "" if job.exit_code is None else str(job.exit_code),
    }
    for key, value in details.items():
        if value:
            output.text(f"  {key:<10} {value}")


def _ranks(job: Job) -> int:
    return sum(max(1, len(share.gpus)) for share in job.placement.shares) if job.placement else 1


def _sentence(job: Job) -> str:
    return f"job {job.id} {job.spec.name} {job.state}: {job.reason}"
