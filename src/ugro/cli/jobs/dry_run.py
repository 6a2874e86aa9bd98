"""``--dry-run``: shows the exact plan."""

from __future__ import annotations

from collections.abc import Iterator

from ugro import __version__
from ugro.cli.jobs.describe import command, variables
from ugro.cli.jobs.document import plan_document, without_secrets
from ugro.cli.jobs.result_summary import amount
from ugro.cli.output import Output
from ugro.core.job import Launcher, places
from ugro.core.plan import DryRun, Plan
from ugro.core.planning import compared, memory_lines

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
    yield from _nodes(plan)


def _packages(dry_run: DryRun) -> Iterator[str]:
    if dry_run.environment is not None:
        yield f"  Python   {dry_run.environment}"
    if dry_run.spec.sdk:
        yield f"  ugro     {__version__} goes with it, at the end of PYTHONPATH"


def _nodes(plan: Plan) -> Iterator[str]:
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
