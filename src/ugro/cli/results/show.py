"""What a job made: ``results`` shows it, copies it, and frees its space."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ugro.cli.jobs import text as words
from ugro.cli.jobs.document import job_document
from ugro.cli.output import Cell, Output
from ugro.cli.results.pull import Conflict, Pulled, pull
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.core.errors import NotAllowed, UgroError, UsageError
from ugro.core.job import Job
from ugro.core.metrics import MetricsSummary
from ugro.core.results import JobResults, NodeResults, ResultState
from ugro.core.support.quantity import format_duration, format_size

_MOST_SHOWN = 20
_LOOK_S = 0.3
_STATES = {
    ResultState.WAITING: "not all is here yet",
    ResultState.LIVE: "the job goes on; this is what came so far",
    ResultState.COMING: "on the way here",
    ResultState.HOME: "all here",
    ResultState.UNKNOWN: "a node cannot be asked whether there is more",
    ResultState.NONE: "it wrote nothing to $UGRO_OUTPUT",
    ResultState.REMOVED: "removed",
}


@click.command()
@click.argument("job", default="last")
@click.option("--attempt", type=click.IntRange(1), help="Of this attempt; default: the newest.")
@click.option("--pull", "target", type=click.Path(path_type=Path), metavar="DIR", help="Copy all of it to DIR.")
@click.option("--force", is_flag=True, help="With --pull: write over files that differ.")
@click.option("--rm", "is_removal", is_flag=True, help="Delete them here and on the nodes; logs stay.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@pass_session
def results(session: Session, /, job: str, attempt: int | None, target: Path | None, **flags: bool) -> int:
    """Show what JOB made: its files, whether all of them are here, and how it went.

    What a job writes to the folder $UGRO_OUTPUT, or names under outputs in its job file, comes home by itself.
    """
    client = session.client()
    if flags["is_removal"]:
        if target is not None or attempt is not None:
            raise UsageError("--rm frees all of it, and stands alone", hint="pull it first, then remove it")
        return _remove(session.output, client, job, is_sure=flags["yes"])
    if target is not None:
        return _pull(session.output, client, (job, attempt), target, is_forced=flags["force"])
    found, made = client.jobs.results(job, attempt=attempt)
    if session.output.is_json:
        session.output.document({"job": {**job_document(found), "results": made}})
    else:
        _show(session.output, found, made)
    return 0


def _remove(output: Output, client: Client, word: str, *, is_sure: bool) -> int:
    job, made = client.jobs.results(word)
    facts = [f"job {job.id} {job.spec.name}: {_amount(made.files, made.bytes)} in {made.folder}"]
    if not is_sure and job.is_final and job.cached_from is None:
        if output.is_json:
            raise UsageError("this deletes them for good", hint="say that you mean it: --yes")
        if not output.confirm(facts, "delete its results?"):
            return 1
    removed, problems = client.jobs.remove_results(job.id)
    for problem in problems:
        output.warn(problem)
    if output.is_json:
        output.document({"job": {**job_document(removed), "results": client.jobs.results(job.id)[1]}})
    else:
        output.note(f"job {job.id}: its results are removed; its logs stay")
    return 1 if problems else 0


def _pull(output: Output, client: Client, which: tuple[str, int | None], target: Path, *, is_forced: bool) -> int:
    job, made = _arrived(output, client, *which)
    if made.state is ResultState.REMOVED:
        raise NotAllowed(f"the results of job {job.id} were removed")
    pulled = Pulled()
    try:
        pulled = pull(made, target, is_forced=is_forced, on_progress=lambda done: output.progress(_copied(done, made)))
    except Conflict as error:
        raise UgroError(str(error), hint="--force writes over them, or choose another directory") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UgroError(f"cannot copy to {target}: {reason}", hint="what was copied is whole; try again") from error
    output.end_progress()
    if output.is_json:
        copied = {"copied": pulled.files, "same": pulled.same, "bytes": pulled.bytes, "to": str(target.absolute())}
        output.document({"job": {**job_document(job), "results": made, "pulled": copied}})
    else:
        same = f", {pulled.same} were there" if pulled.same else ""
        output.note(f"copied {_amount(pulled.files, pulled.bytes)} to {target}{same}")
    if made.state in (ResultState.WAITING, ResultState.LIVE, ResultState.UNKNOWN):
        output.warn(f"{_STATES[made.state]}: {_problem(made)}")
    return int(made.state is ResultState.WAITING)


def _arrived(output: Output, client: Client, word: str, attempt: int | None) -> tuple[Job, JobResults]:
    """When what is on its way has come; the same job, also for ``last``."""
    job, made = client.jobs.results(word, attempt=attempt)
    while made.state is ResultState.COMING:
        missing = sum(node.missing_bytes for node in made.nodes)
        output.progress(f"waiting for the results of job {job.id}: {format_size(missing)} to come")
        time.sleep(_LOOK_S)
        job, made = client.jobs.results(job.id, attempt=attempt)
    output.end_progress()
    return job, made


def _copied(done: Pulled, made: JobResults) -> str:
    share = f"{100 * done.seen_bytes // made.bytes} %" if made.bytes else ""
    return f"copying: {done.files + done.same} of {made.files} files, {format_size(done.seen_bytes)} {share}"


# --- showing ----------------------------------------------------------------------------------------------------


def _show(output: Output, job: Job, made: JobResults) -> None:
    sign, style = words.SIGNS[job.state]
    output.raw(f"{output.styled(f'{sign} job {job.id} {job.spec.name} {job.state}', style)}\n".encode())
    for name, text in _facts(job, made):
        if text:
            output.text(f"  {name:<11}{text}")
    for node in made.nodes:
        for line in _node_lines(node):
            output.text(f"  {line}")
    if made.files:
        rows = [[Cell(file.name), Cell(_size(output, file.bytes), is_number=True)] for file in _few(output, made)]
        output.table(("FILE", "SIZE" if output.is_terminal else "BYTES"), rows)
    if output.is_terminal and made.files > _MOST_SHOWN:
        output.text(f"  … {made.files - _MOST_SHOWN} more: ls {made.folder}")


def _few(output: Output, made: JobResults) -> Any:
    return made.listed[:_MOST_SHOWN] if output.is_terminal else made.listed


def _size(output: Output, size: int) -> str:
    return format_size(size) if output.is_terminal else str(size)


def _facts(job: Job, made: JobResults) -> Iterator[tuple[str, str]]:
    yield "results", f"{_STATES[made.state]}: {_amount(made.files, made.bytes)}"
    yield "cached", f"from job {job.cached_from}: the same was done before" if job.cached_from else ""
    yield "in", made.folder
    yield "attempt", str(made.attempt) if made.attempt > 1 else ""
    yield "took", format_duration(words.duration_s(job)) if job.is_final else ""
    yield "exit code", "" if job.exit_code is None else str(job.exit_code)
    if made.metrics is not None:
        yield from _measured(made.metrics)
    yield "checkpoint", _checkpoint(made)


def _measured(metrics: MetricsSummary) -> Iterator[tuple[str, str]]:
    yield "loss", _loss(metrics)
    speed, use, imbalance = metrics.throughput, metrics.device_use, metrics.imbalance
    yield "throughput", f"{speed:.4g} ({metrics.throughput_name}, on average)" if speed is not None else ""
    yield "device use", f"{100 * use:.0f} % ({metrics.device_use_name}, on average)" if use is not None else ""
    yield "imbalance", f"{imbalance:.2f} (slowest rank against the mean)" if imbalance is not None else ""
    yield "steps", "" if metrics.last_step is None else str(metrics.last_step)


def _loss(metrics: MetricsSummary) -> str:
    words = []
    if metrics.final_loss is not None and metrics.best_loss is not None:
        at = "" if metrics.best_step is None else f" at step {metrics.best_step}"
        words.append(f"{metrics.final_loss:.4g}, at best {metrics.best_loss:.4g}{at}")
    if metrics.lost_at_step is not None:
        words.append(f"no finite number from step {metrics.lost_at_step} on")
    return "; ".join(words)


def _checkpoint(made: JobResults) -> str:
    """The one that is here, or else where it was written."""
    here = next((part.path for part in made.parts if part.name.split("/")[0] == "checkpoints"), None)
    there = made.metrics.checkpoint if made.metrics is not None else None
    at = f" (step {made.metrics.checkpoint_step})" if made.metrics is not None and there else ""
    return f"{here}{at}" if here else f"{there}{at}, on its node" if there else ""


def _node_lines(node: NodeResults) -> Iterator[str]:
    if node.problem:
        yield f"{node.node}: {node.problem}"
    elif node.state is ResultState.COMING:
        yield f"{node.node}: {_amount(node.missing_files, node.missing_bytes)} to come"
    if node.left_count:
        size = sum(file.bytes for file in node.left)
        yield f"{node.node}: {_amount(node.left_count, size)} stayed there ({node.left[0].reason}):"
        yield from (f"  {file.name}  {format_size(file.bytes)}" for file in node.left[:_MOST_SHOWN])
    for file in node.unsendable[:_MOST_SHOWN]:
        yield f"{node.node}: {file.name} was passed over: {file.reason}"


def _problem(made: JobResults) -> str:
    problems = [f"{node.node}: {node.problem}" for node in made.nodes if node.problem]
    return "; ".join(problems) or _amount(made.files, made.bytes)


def _amount(files: int, size: int) -> str:
    return f"{files} {'file' if files == 1 else 'files'}, {format_size(size)}"
