"""The ``--json`` form of a job, one for all commands: names are stable, times RFC 3339, durations seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ugro import __version__
from ugro.cli.jobs.describe import command, duration_s, ranks, variables
from ugro.cli.output import Output
from ugro.client.client import Client
from ugro.features.planning.model import compared, memory_lines
from ugro.kernel.access.model import account_of, node_of
from ugro.kernel.files.model import JobResults, ResultState
from ugro.kernel.files.operations import GetBriefJobResults
from ugro.kernel.jobs.model import Attempt, Job, JobSpec, Launcher, Placement, Share, places
from ugro.kernel.jobs.records import DryRun, Plan, RankPlan
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.quantities import format_size
from ugro.kernel.support.secrets import masked

_WithEnv = TypeVar("_WithEnv", JobSpec, RankPlan)


def job_document(job: Job, attempts: Sequence[Attempt] | None = None) -> dict[str, Any]:
    """``attempts`` only where they were asked for."""
    document = {
        "id": job.id,
        "name": job.spec.name,
        "state": job.state,
        "reason": job.reason,
        "exit_code": job.exit_code,
        "user": job.user,
        "priority": job.spec.priority,
        "attempt": job.attempt,
        "ranks": ranks(job) if job.placement else None,
        "nodes": _nodes(job.placement),
        "submitted_at": job.submitted_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "duration_s": round(duration_s(job), 3),
        "cached_from": job.cached_from,
        "origin": job.origin,
        "spec": without_secrets(job.spec),
    }
    if attempts is not None:
        document["attempts"] = [_attempt(attempt) for attempt in attempts]
    return document


def plan_document(plan: Plan | None) -> Plan | None:
    if plan is None:
        return None
    nodes = (replace(node, ranks=tuple(map(without_secrets, node.ranks))) for node in plan.nodes)
    return replace(plan, nodes=tuple(nodes))


def without_secrets(of: _WithEnv) -> _WithEnv:
    """Programs write what they read into logs: they get no value that looks secret either."""
    shown = replace(of, env=tuple(masked(of.env).items()))
    if isinstance(shown, JobSpec) and shown.environment is not None:
        return replace(shown, environment=shown.environment.masked)
    return shown


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "nodes": _nodes(attempt.placement),
        "started_at": attempt.started_at,
        "ended_at": attempt.ended_at,
        "outcome": attempt.outcome,
        "failure": attempt.failure,
    }


def _nodes(placement: Placement | None) -> list[dict[str, Any]]:
    return [_node(share) for share in placement.shares] if placement else []


def _node(share: Share) -> dict[str, Any]:
    shown = {"name": node_of(share.node), "gpus": share.gpus}
    return {**shown, "account": account} if (account := account_of(share.node)) else shown


# --- result summary ---------------------------------------------------------------------------------------------------
# What became of a job's files, in a line or two: when an attached job ends, in ``ugro why`` and ``ugro status``.


_LOOK_S = 0.1
_WAIT_S = 10.0  # for files that are on their way; then the command ends without them


def show_results(output: Output, client: Client, job: Job) -> None:
    """Waits a little for what is on its way. A problem here is not the job's."""
    if output.is_quiet:
        return
    try:
        made = client.ask(GetBriefJobResults(str(job.id))).results
        until = time.monotonic() + _WAIT_S
        while made.state is ResultState.COMING and time.monotonic() < until:
            left = sum(node.missing_bytes for node in made.nodes)
            output.progress(f"collecting the files of job {job.id}: {format_size(left)} left")
            time.sleep(_LOOK_S)
            made = client.ask(GetBriefJobResults(str(job.id))).results
    except (UgroError, KeyboardInterrupt):
        return
    finally:
        output.end_progress()
    for line in result_lines(job, made):
        output.note(line)


def result_lines(job: Job, made: JobResults) -> Iterator[str]:
    yield from (f"{name}: {text}" for name, text in result_facts(job, made))


def result_facts(job: Job, made: JobResults) -> Iterator[tuple[str, str]]:
    if made.state in (ResultState.COMING, ResultState.UNKNOWN, ResultState.WAITING):
        problem = next((f" ({node.node}: {node.problem})" for node in made.nodes if node.problem), "")
        yield "files", f"not all of them are here yet{problem}; see: ugro results {job.id}"
    elif made.files:
        yield "files", f"{amount(made.files, made.bytes)} in {_short(made.folder)}"
    if made.left_count:
        yield "left", f"{amount(made.left_count, made.left_bytes)} on {_result_summary_nodes(made)}; {fetch_hint(job)}"
    for attempt in made.left_before:
        yield "left", f"attempt {attempt} left files, too: ugro results {job.id} --attempt {attempt}"


def fetch_hint(job: Job) -> str:
    return f"fetch them: ugro results {job.id} --fetch"


def amount(files: int, size: int) -> str:
    return f"{files:,} {'file' if files == 1 else 'files'}, {format_size(size)}"


def _result_summary_nodes(made: JobResults) -> str:
    names = [node.node for node in made.nodes if node.left_count]
    return names[0] if len(names) == 1 else f"{len(names)} nodes"


def _short(folder: str) -> str:
    home = str(Path.home())
    return f"~{folder.removeprefix(home)}" if folder.startswith(home + "/") else folder


# --- dry run ----------------------------------------------------------------------------------------------------------
# ``--dry-run``: shows the exact plan.


_MOST_SKIPPED = 5  # files that are named


def show_dry_run(output: Output, dry_run: DryRun) -> None:
    if output.is_json:
        output.document(
            {
                "plan": plan_document(dry_run.plan),
                "placement": dry_run.placement,
                "starts_now": dry_run.starts_now,
                "reason": dry_run.reason,
                "spec": without_secrets(dry_run.spec),
                "snapshot": dry_run.snapshot,
                "note": dry_run.note,
                "environment": dry_run.environment,
                "prediction": dry_run.prediction,
                "memory": dry_run.memory,
            }
        )
        return
    for line in _lines(dry_run):
        output.text(line)


def _lines(dry_run: DryRun) -> Iterator[str]:
    spec, plan = dry_run.spec, dry_run.plan
    if dry_run.starts_now:
        yield f"{spec.name} would start now ({dry_run.reason})"
    else:
        yield f"{spec.name} would wait: {dry_run.reason}"
        yield "the plan if the cluster were idle:" if plan else "no plan is possible now"
    if plan is not None:
        yield f"  nodes    {places(dry_run.placement)}"
        if spec.launcher is not Launcher.COMMAND:
            yield f"  speed    {_speed(dry_run)}"
            yield from (f"  memory   {line}" for line in memory_lines(dry_run.memory))
        yield from _plan(dry_run, plan)


def _speed(dry_run: DryRun) -> str:
    if dry_run.prediction is None:
        return f"not predicted: ugro plan {command(dry_run.spec.argv)}"
    return f"{compared(dry_run.prediction, None)} (predicted)"


def _plan(dry_run: DryRun, plan: Plan) -> Iterator[str]:
    spec = dry_run.spec
    if dry_run.note is not None:
        yield f"  note     {dry_run.note}"
    if (code := dry_run.snapshot) is not None:
        yield f"  code     {code.folder}: {amount(code.files, code.bytes)}, {code.id[:12]}"
        yield from (f"  not sent {sentence}" for sentence in code.skipped[:_MOST_SKIPPED])
    for one in spec.folders:
        size = f"{amount(one.files, one.bytes)}, {one.tree[:12]}"
        yield f"  folder   {one.name}: {one.source}: {size}, in ${one.variable}"
    yield from _packages(dry_run)
    yield f"  ranks    {plan.world_size}"
    if plan.rendezvous is not None:
        port = plan.rendezvous.port or "a free port"
        guess = " (a guess; decided at the start)" if plan.rendezvous.is_tentative else ""
        yield f"  meet at  {plan.rendezvous.address}, {port}{guess}"
    if spec.setup:
        yield "  setup"
        yield from (f"    | {line}" for line in spec.setup.splitlines())
    if spec.checkpoint.dir:
        yield f"  checkpoints in {spec.checkpoint.dir}"
    if spec.outputs:
        yield f"  collects {', '.join(spec.outputs)}"
    yield from _dry_run_nodes(plan)


def _packages(dry_run: DryRun) -> Iterator[str]:
    if dry_run.environment is not None:
        yield f"  Python   {dry_run.environment}"
    if dry_run.spec.sdk:
        yield f"  ugro     {__version__} goes with it, at the end of PYTHONPATH"


def _dry_run_nodes(plan: Plan) -> Iterator[str]:
    shared = _shared(plan)
    if shared:
        yield "every rank"
        yield from (f"    {variable}" for variable in variables(shared))
    for node in plan.nodes:
        yield f"{node.node}  in {node.cwd or 'a folder of its own'}"
        for rank in node.ranks:
            yield f"  rank {rank.rank}"
            yield from (f"    {variable}" for variable in variables(pair for pair in rank.env if pair not in shared))
            yield f"    {command(rank.argv)}"
            yield f"    output in logs/rank_{rank.rank}.log"


def _shared(plan: Plan) -> list[tuple[str, str]]:
    """The variables that all ranks have in common; none if there is one rank."""
    first, *others = [rank for node in plan.nodes for rank in node.ranks]
    return [pair for pair in first.env if all(pair in rank.env for rank in others)] if others else []
