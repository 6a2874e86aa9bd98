"""``ugro results``: shows, copies and deletes the results of a job. ``ugro sync``: sends code."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ugro.cli import candidates
from ugro.cli.jobs import describe
from ugro.cli.jobs.document import amount, fetch_hint, job_document
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import Session, json_option, pass_session
from ugro.cli.untrusted import file_name
from ugro.client.client import Client
from ugro.client.pulling import Pulled, arrived, pull
from ugro.features.planning.model import compared, speed
from ugro.features.training.cli import energy_facts
from ugro.kernel.files.model import JobResults, NodeResults, ResultState, Snapshot, SyncReport
from ugro.kernel.files.operations import DeleteJobResults, FetchJobResults, GetJobResults, SyncCode, SyncSent, SyncTaken
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.errors import NotFound, UgroError, UsageError
from ugro.kernel.support.quantities import Progress, format_duration, format_size, together
from ugro.kernel.telemetry.model import MetricsSummary

# --- fetch ------------------------------------------------------------------------------------------------------------
# ``ugro results --fetch``: fetches files that were left on the nodes, and shows how far that is.


_LOOK_S = 0.2


def fetch(output: Output, client: Client, which: tuple[str, int | None], patterns: Sequence[str]) -> int:
    word, attempt = which
    found = client.ask(GetJobResults(word, attempt))
    job, before = found.job, found.results
    if before.left_count:
        begun = client.ask(FetchJobResults(str(job.id), tuple(patterns), attempt))
        job = begun.job
        made = _fetched(output, client, job, attempt, begun.results)
    else:
        made = before
    files, size = before.left_count - made.left_count, before.left_bytes - made.left_bytes
    if before.left_count and not files and patterns:
        raise NotFound(f"no file that was left on a node matches {' '.join(patterns)}", hint=f"ugro results {job.id}")
    if output.is_json:
        fetched = {"files": files, "bytes": size}
        output.document({"job": {**job_document(job), "results": made, "fetched": fetched}})
    elif not before.left_count:
        output.note(f"job {job.id} has left no files on its nodes")
    else:
        output.note(f"fetched {amount(files, size)} to {made.folder}")
    return 0


def _fetched(output: Output, client: Client, job: Job, attempt: int | None, made: JobResults) -> JobResults:
    """Waits. The files that have not come are still on their nodes if this fails or is interrupted."""
    while made.state is ResultState.COMING:
        left = sum(node.missing_bytes for node in made.nodes)
        output.progress(f"fetching what job {job.id} left: {format_size(left)} to go")
        time.sleep(_LOOK_S)
        made = client.ask(GetJobResults(str(job.id), attempt)).results
    output.end_progress()
    problem = next((f"{node.node}: {node.problem}" for node in made.nodes if node.problem), None)
    if problem is not None:
        raise UgroError(problem, hint="nothing is lost; what has not come is still there: try again")
    return made


# --- results ----------------------------------------------------------------------------------------------------------


_MOST_SHOWN = 20
_STATES = {
    ResultState.WAITING: "not complete yet",
    ResultState.LIVE: "the job is running; these are the results so far",
    ResultState.COMING: "being collected",
    ResultState.HOME: "complete",
    ResultState.UNKNOWN: "a node cannot be reached; there may be more",
    ResultState.NONE: "the job made no files; its settings and logs",
    ResultState.REMOVED: "removed",
}


@click.command()
@click.argument("job", default="last", shell_complete=candidates.jobs)
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Use this attempt; default: the newest.")
@click.option("--pull", "target", type=click.Path(path_type=Path), metavar="DIR", help="Copy the results to DIR.")
@click.option("--force", is_flag=True, help="With --pull: overwrite files that differ.")
@click.option("--fetch", "is_fetch", is_flag=True, help="Fetch files that were left on the nodes: all, or those named.")
@click.option("--rm", "is_removal", is_flag=True, help="Delete the results here and on the nodes; keep the logs.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@json_option
@pass_session
def results(
    session: Session, /, job: str, patterns: tuple[str, ...], attempt: int | None, target: Path | None, **flags: bool
) -> int:
    """Show, fetch, copy or delete the files of a job.

    UGRO collects the files that a job makes or changes in its working directory, or writes to $UGRO_OUTPUT. What it
    leaves on a node (too large, or named by an ignore file) is listed here with the reason; --fetch collects it.

    \b
    Examples:
      ugro results train
      ugro results 12 --fetch 'checkpoints/*.pt'
      ugro results 12 --pull ./run12
    """
    client = session.client()
    if patterns and not flags["is_fetch"]:
        raise UsageError(f"unexpected argument {patterns[0]!r}", hint="names of files stand after --fetch")
    if flags["is_fetch"]:
        if flags["is_removal"] or target is not None:
            raise UsageError("--fetch cannot be used with --rm or --pull", hint="fetch the files first")
        return fetch(session.output, client, (job, attempt), patterns)
    if flags["is_removal"]:
        if target is not None or attempt is not None:
            problem = "--rm deletes all results: it cannot be used with --pull or --attempt"
            raise UsageError(problem, hint="copy them first, then delete them")
        return _remove(session.output, client, job, is_sure=flags["yes"])
    if target is not None:
        return _pull(session.output, client, (job, attempt), target, is_forced=flags["force"])
    output = session.output
    has_all = output.is_json or not output.is_terminal
    answer = client.ask(GetJobResults(job, attempt, all_files=has_all))
    found, made = answer.job, answer.results
    if output.is_json:
        output.document({"job": {**job_document(found), "results": made}})
    else:
        _show(output, found, made)
    return 0


def _remove(output: Output, client: Client, word: str, *, is_sure: bool) -> int:
    found = client.ask(GetJobResults(word))
    job, made = found.job, found.results
    facts = [f"job {job.id} {job.spec.name}: {amount(made.files, made.bytes)} in {made.folder}"]
    if made.left_count:
        facts.append(f"and {amount(made.left_count, made.left_bytes)} on its nodes")
    if not is_sure and job.is_final and job.cached_from is None:
        if output.is_json:
            raise UsageError("this deletes the results permanently", hint="confirm with --yes")
        if not output.confirm(facts, "Delete these results?"):
            return 1
    deleted = client.ask(DeleteJobResults(str(job.id)))
    removed, problems = deleted.job, deleted.problems
    for problem in problems:
        output.warn(problem)
    if output.is_json:
        output.document({"job": {**job_document(removed), "results": client.ask(GetJobResults(str(job.id))).results}})
    else:
        output.note(f"job {job.id}: results deleted; logs kept")
    return 1 if problems else 0


def _pull(output: Output, client: Client, which: tuple[str, int | None], target: Path, *, is_forced: bool) -> int:
    job, made = arrived(client, *which, lambda one: output.progress(_awaited(one)))
    output.end_progress()
    pulled = pull(
        client, made, target, is_forced=is_forced, on_progress=lambda done: output.progress(_copied(done, made))
    )
    output.end_progress()
    if output.is_json:
        copied = {"copied": pulled.files, "same": pulled.same, "bytes": pulled.bytes, "to": str(target.absolute())}
        output.document({"job": {**job_document(job), "results": made, "pulled": copied}})
    else:
        same = f", {pulled.same} were there already" if pulled.same else ""
        output.note(f"copied {amount(pulled.files, pulled.bytes)} to {target}{same}")
    if made.state in (ResultState.WAITING, ResultState.LIVE, ResultState.UNKNOWN):
        output.warn(f"{_STATES[made.state]}: {_problem(made)}")
    return int(made.state is ResultState.WAITING)


def _awaited(made: JobResults) -> str:
    missing = sum(node.missing_bytes for node in made.nodes)
    return f"waiting for the results of job {made.job}: {format_size(missing)} left"


def _copied(done: Pulled, made: JobResults) -> str:
    share = f"{100 * done.seen_bytes // made.bytes} %" if made.bytes else ""
    return f"copying: {done.files + done.same} of {made.files} files, {format_size(done.seen_bytes)} {share}"


# --- showing ----------------------------------------------------------------------------------------------------


def _show(output: Output, job: Job, made: JobResults) -> None:
    sign, style = describe.SIGNS[job.state]
    output.raw(f"{output.styled(f'{sign} job {job.id} {job.spec.name} {job.state}', style)}\n".encode())
    for name, text in _facts(job, made):
        if text:
            output.text(f"  {name:<11}{text}")
    for line in (*(line for node in made.nodes for line in _node_lines(node)), *_hints(job, made)):
        output.text(f"  {line}")
    if made.files:
        sizes = [Cell(_size(output, file.bytes), is_number=True) for file in _few(output, made)]
        rows = [[Cell(file_name(file.name)), size] for file, size in zip(_few(output, made), sizes, strict=True)]
        output.table(("FILE", "SIZE" if output.is_terminal else "BYTES"), rows)
    if output.is_terminal and made.files > _MOST_SHOWN:
        output.text(f"  … {made.files - _MOST_SHOWN} more: ls {made.folder}")


def _hints(job: Job, made: JobResults) -> Iterator[str]:
    if made.left_count:
        words = f" --attempt {made.attempt}" if made.attempt < job.attempt else ""
        yield f"{fetch_hint(job)}{words}"
    for attempt in made.left_before:
        yield f"attempt {attempt} left files, too: ugro results {job.id} --attempt {attempt}"


def _few(output: Output, made: JobResults) -> Any:
    return made.listed[:_MOST_SHOWN] if output.is_terminal else made.listed


def _size(output: Output, size: int) -> str:
    return format_size(size) if output.is_terminal else str(size)


def _facts(job: Job, made: JobResults) -> Iterator[tuple[str, str]]:
    yield "results", f"{_STATES[made.state]}: {amount(made.files, made.bytes)}"
    yield "not here", f"what it wrote in {job.spec.cwd} stays there" if job.spec.cwd else ""
    yield "cached", f"from job {job.cached_from}, an identical job" if job.cached_from else ""
    yield "in", made.folder
    yield "attempt", str(made.attempt) if made.attempt > 1 else ""
    yield "took", format_duration(describe.duration_s(job)) if job.is_final else ""
    yield "exit code", "" if job.exit_code is None else str(job.exit_code)
    if made.metrics is not None:
        yield from _measured(made.metrics)
    yield from energy_facts(made.energy)
    if made.forecast is not None:
        yield "predicted", compared(made.forecast.prediction, made.metrics.throughput if made.metrics else None)
    yield "checkpoint", _checkpoint(made)


def _measured(metrics: MetricsSummary) -> Iterator[tuple[str, str]]:
    yield "loss", _loss(metrics)
    rate, use, imbalance = metrics.throughput, metrics.device_use, metrics.imbalance
    yield "throughput", f"{speed(rate)} ({metrics.throughput_name}, on average)" if rate is not None else ""
    yield "device use", f"{100 * use:.0f} % ({metrics.device_use_name}, on average)" if use is not None else ""
    yield "imbalance", f"{imbalance:.2f} (slowest rank compared to the mean)" if imbalance is not None else ""
    yield "steps", "" if metrics.last_step is None else str(metrics.last_step)


def _loss(metrics: MetricsSummary) -> str:
    words = []
    if metrics.final_loss is not None and metrics.best_loss is not None:
        at = "" if metrics.best_step is None else f" at step {metrics.best_step}"
        name = "" if metrics.loss_name in (None, "loss") else f" ({metrics.loss_name})"
        words.append(f"last {metrics.final_loss:.4g}, best {metrics.best_loss:.4g}{at}{name}")
    if metrics.lost_at_step is not None:
        words.append(f"not finite from step {metrics.lost_at_step} on")
    return "; ".join(words)


def _checkpoint(made: JobResults) -> str:
    """The collected one, or else where it was written."""
    here = next((part.path for part in made.parts if part.name.split("/")[0] == "checkpoints"), None)
    there = made.metrics.checkpoint if made.metrics is not None else None
    at = f" (step {made.metrics.checkpoint_step})" if made.metrics is not None and there else ""
    return f"{here}{at}" if here else f"{there}{at}, on its node" if there else ""


def _node_lines(node: NodeResults) -> Iterator[str]:
    if node.problem:
        yield f"{node.node}: {node.problem}"
    elif node.state is ResultState.COMING:
        yield f"{node.node}: {amount(node.missing_files, node.missing_bytes)} not collected yet"
    yield from _left_lines(node)
    for file in node.unsendable[:_MOST_SHOWN]:
        yield f"{node.node}: {file_name(file.name)} was skipped: {file.reason}"


def _left_lines(node: NodeResults) -> Iterator[str]:
    if not node.left_count:
        return
    yield f"{node.node}: {amount(node.left_count, node.left_bytes)} left on the node:"
    reasons = dict.fromkeys(file.reason for file in node.left)
    few = max(1, _MOST_SHOWN // max(1, len(reasons)))
    shown = 0
    for reason in reasons:
        yield f"  {reason}:"
        files = [file for file in node.left if file.reason == reason][:few]
        shown += len(files)
        yield from (f"    {file_name(file.name)}  {format_size(file.bytes)}" for file in files)
    if node.left_count > shown:
        yield f"  … {node.left_count - shown} more"


def _problem(made: JobResults) -> str:
    problems = [f"{node.node}: {node.problem}" for node in made.nodes if node.problem]
    return "; ".join(problems) or amount(made.files, made.bytes)


# --- sync -------------------------------------------------------------------------------------------------------------
# ``ugro sync``: sends code to the nodes, or shows what would be sent and why.


_ENDED = ("done", "failed", "would")
_STYLES: dict[str, Style] = {"done": "good", "failed": "bad"}


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and why; send nothing.")
@click.option(
    "--workdir",
    metavar="DIR",
    default=".",
    shell_complete=candidates.directories,
    help="Directory to send; default: the current one.",
)
@click.option("--force", is_flag=True, help="Send the code even if it is larger than sync.max_size.")
@json_option
@pass_session
def sync(session: Session, nodes: tuple[str, ...], dry_run: bool, workdir: str, force: bool) -> int:
    """Send code to nodes.

    Sends the code in the current directory to NODES, or to all nodes; only files that a node lacks are transferred.
    Jobs do this by themselves. See docs/sync.md for what is left out.

    \b
    Examples:
      ugro sync --dry-run
      ugro sync gpu1 gpu2
    """
    output = session.output
    client = session.client(uses_nodes=True)
    output.progress(f"reading {workdir}")
    snapshot: Snapshot | None = None
    reports: dict[str, SyncReport] = {}
    folder = os.path.abspath(os.path.expanduser(workdir))
    for update in client.follow(SyncCode(folder, tuple(nodes), dry_run=dry_run, force=force)):
        if isinstance(update, SyncTaken):
            snapshot = update.snapshot
        elif isinstance(update, SyncSent):
            reports[update.node.node] = update.node
            output.progress(_progress(list(reports.values())))
    output.end_progress()
    found = sorted(reports.values(), key=lambda report: report.node)
    if output.is_json:
        output.document({"snapshot": snapshot, "nodes": found})
    elif snapshot is not None:
        _sync_show(output, snapshot, found)
    return 1 if any(report.state == "failed" for report in found) else 0


def _progress(reports: list[SyncReport]) -> str:
    done = sum(report.state in _ENDED for report in reports)
    sending = [
        Progress(
            report.sent_bytes, report.bytes, report.sent_files, report.files,
            report.bytes_per_s if report.state not in _ENDED else None,
        )
        for report in reports if report.state != "would"
    ]  # fmt: skip
    words = f": {together(sending)}" if any(one.bytes for one in sending) else ""
    return f"{done} of {len(reports)} nodes{words}"


def _sync_show(output: Output, snapshot: Snapshot, reports: list[SyncReport]) -> None:
    output.note(f"{snapshot.folder}: {amount(snapshot.files, snapshot.bytes)}, {snapshot.id[:12]}")
    for sentence in snapshot.skipped[:_MOST_SHOWN]:
        output.note(f"not sent: {sentence}")
    rows = [
        [
            Cell(report.node, "id"),
            Cell(report.state, _STYLES.get(report.state, "")),
            Cell(f"{report.files:,}", is_number=True),
            Cell(format_size(report.bytes), is_number=True),
            Cell(format_size(report.wire_bytes) if report.state != "would" else "", is_number=True),
            Cell(format_duration(report.seconds) if report.seconds else "", is_number=True),
            Cell(report.error or report.why),
        ]
        for report in reports
    ]
    output.table(["NODE", "STATE", "FILES", "SIZE", "SENT", "TIME", "WHY"], rows)
    _show_paths(output, reports)
    for report in reports:
        if report.hint:
            output.note(f"{report.node}: {report.hint}")


def _show_paths(output: Output, reports: list[SyncReport]) -> None:
    for report in reports:
        for travel in report.travels[:_MOST_SHOWN]:
            output.note(f"{report.node}  {travel.why:<8} {format_size(travel.bytes):>10}  {travel.path}")
        if report.files > _MOST_SHOWN and report.travels:
            output.note(f"{report.node}  … and {report.files - _MOST_SHOWN:,} more; see all with --json")
