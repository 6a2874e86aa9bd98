"""``ugro plan``, and the nodes that ``ugro launch --nodes best`` uses."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ugro.cli.jobs.options import LaunchCommand, NodeNumber, job_options
from ugro.cli.jobs.origin import code_folder
from ugro.cli.session import Session, json_option, pass_session
from ugro.features.planning.model import (
    MOST_NODES,
    LaunchPlan,
    NodeFigures,
    Prediction,
    local_title,
    memory_lines,
    percent,
    speed,
    title,
)
from ugro.kernel.support.errors import Interrupted, UsageError
from ugro.kernel.support.quantities import format_size

if TYPE_CHECKING:
    from ugro.client.client import Client
    from ugro.features.planning.client import PlanWish

BEST = "best"
_FEW = 6  # sets that are shown
# Options of a plan, and those that the plan itself decides; with whether they have a value.
_NOT_OF_A_LAUNCH = {
    **{"--nodes": True, "--only": True, "--seconds": True},
    **{"--fresh": False, "--all": False, "--json": False},
}


@click.command(cls=LaunchCommand)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A job file (see docs/jobs.md).")
@job_options(without=("nodes",), submits=False)
@click.option(
    "--nodes",
    type=NodeNumber(MOST_NODES, everything=MOST_NODES),
    metavar="N|all",
    help="The most nodes to consider. Default, and at most: 10.",
)
@click.option("--fresh", is_flag=True, help="Measure again what is known.")
@click.option("--seconds", type=click.IntRange(1, 600), default=30, show_default=True, help="Longest trial of a node.")
@click.option("--all", "is_all", is_flag=True, help="Show all sets of nodes.")
@json_option
@pass_session
@click.pass_context
def plan(ctx: click.Context, session: Session, /, file: Path | None, is_all: bool, **fields: Any) -> int:
    """Predict how fast a training is on each set of nodes.

    Runs SCRIPT for a few steps on each node alone, and once on all of them together. From that it predicts the samples
    per second of every set of nodes, and shows the fastest ones. The trials are jobs: they wait for free nodes, and end
    by themselves without checkpoints and results. What they measured is kept for the next plan. SCRIPT must use
    ugro.train.

    \b
    Examples:
      ugro plan train.py --nodes 3
      ugro plan -f job.yaml --fresh
    """
    script = ctx.meta["script"]
    if (file is None) == (script is None):
        problem = "a script or a job file is needed" if file is None else "give a script or a job file, not both"
        raise UsageError(problem, hint="ugro plan train.py --nodes 3, or: ugro plan -f job.yaml")
    given = {**fields, "script": script, "args": ctx.meta["args"]}
    code_folder(session.output, file, given)
    found = _planned(session, session.client(uses_nodes=True), file, _wish(given))
    if session.output.is_json:
        session.output.document({"plan": found, "command": _command(ctx, found)})
        return 0
    for line in _lines(found, is_all=is_all):
        session.output.text(line)
    session.output.text(f"      {shlex.join(_command(ctx, found))}")
    return 0


def best_nodes(
    session: Session, file: Path | None, given: dict[str, Any], most: int | None, *, force: bool
) -> dict[str, Any]:
    """The same fields with the nodes of the best set, which is measured if it is not known."""
    fields = {name: value for name, value in given.items() if name != "nodes"}
    client = session.new_client()
    client.agent()  # what there is to say about it is said when the job is submitted
    found = _planned(session, client, file, _wish({**fields, "nodes": most, "force": force}))
    best = found.best
    everyone = len(found.nodes)
    session.output.note(f"best: {title(best, everyone)}, {speed(best.samples_per_s)} samples/s {percent(best.error)}")
    return {**fields, "nodes": str(len(best.nodes)), "only": list(best.nodes)}


def _wish(given: dict[str, Any]) -> PlanWish:
    from ugro.features.planning.client import PlanWish

    own = {name: given.pop(name, None) for name in ("nodes", "fresh", "seconds", "force")}
    fields = {name: value for name, value in given.items() if value is not None and value not in ((), [])}
    seconds = own["seconds"]
    limit_s = None if seconds is None else float(seconds)
    return PlanWish(fields, own["nodes"], bool(own["fresh"]), limit_s, bool(own["force"]))


def _planned(session: Session, client: Client, file: Path | None, wish: PlanWish) -> LaunchPlan:
    session.output.progress("reading the code")
    try:
        found = client.planning.plan(file, wish, on_progress=session.output.progress)
    except KeyboardInterrupt:
        client.close()  # the agent ends the trials
        raise Interrupted("interrupted: the trials are being stopped, nothing was submitted") from None
    session.output.end_progress()
    return found


# --- words --------------------------------------------------------------------------------------------------------


def _lines(found: LaunchPlan, *, is_all: bool) -> Iterator[str]:
    everyone = len(found.nodes)
    shown = found.predictions if is_all else _chosen(found.predictions, everyone)
    titles = [title(one, everyone) for one in shown]
    local = found.local
    more = [] if local is None else [local_title(local, everyone)]
    width = max(map(len, [*titles, *more]))
    for place, (one, words) in enumerate(zip(shown, titles, strict=True)):
        head = "best: " if not place else "      "
        tail = f" samples/s  {percent(one.error)}" if not place else f"  {one.why}" if one.why else ""
        yield f"{head}{words:<{width}}  {speed(one.samples_per_s):>8}{tail}"
    if local is not None:
        rest = "what this training does" if found.is_of_local else "changes the training: see docs/slow-networks.md"
        yield f"      {more[0]:<{width}}  {speed(local.samples_per_s):>8}  {rest}"
    if len(shown) < len(found.predictions):
        yield f"      {len(found.predictions) - len(shown)} more: --all"
    yield from _facts(found)


def _chosen(predictions: Sequence[Prediction], everyone: int) -> list[Prediction]:
    """The fastest ones, and among them all nodes together and the fastest single node."""
    single = next((one for one in predictions if len(one.nodes) == 1), None)
    whole = next((one for one in predictions if len(one.nodes) == everyone), None)
    wanted = [one for one in (single, whole) if one is not None]
    others = [one for one in predictions if one not in wanted]
    few = {id(one) for one in (*wanted, *others[: max(0, _FEW - len(wanted))], predictions[0])}
    return [one for one in predictions if id(one) in few]


def _facts(found: LaunchPlan) -> Iterator[str]:
    best, batch = found.best, found.global_batch
    if len(best.shares) > 1:
        parts = _by_node(found, best)
        yield f"      shares: {parts} of {batch} samples, {1000 * best.step_s:.0f} ms a step"
    size = format_size(found.gradient_bytes)
    yield f"      model: {found.parameters:,} parameters, {size} of gradients in every step"
    yield from (f"      {_node(node)}" for node in found.nodes)
    yield from (f"      memory: {line}" for line in memory_lines(found.memory))
    yield from (f"      {one.node} is left out: {one.reason}" for one in found.left_out)
    yield from (f"      note: {note}" for note in found.notes)


def _by_node(found: LaunchPlan, best: Prediction) -> str:
    """Shares are of ranks; nodes have equally many of them, or it is one list."""
    if len(best.shares) == len(best.nodes):
        return ", ".join(f"{node} {share}" for node, share in zip(best.nodes, best.shares, strict=True))
    return " + ".join(map(str, best.shares))


def _node(node: NodeFigures) -> str:
    parts = [f"{1000 * node.fixed_s:.0f} ms + {1000 * node.per_sample_s:.3g} ms a sample"]
    if node.data_share >= 0.01:
        parts.append(f"{100 * node.data_share:.0f} % waiting for data")
    if node.memory_bytes:
        parts.append(f"{format_size(node.memory_bytes)} of memory")
    when = f"measured {node.at}" if node.is_cached else "measured now"
    return f"{node.node}: {', '.join(parts)}; {when} ({node.device})"


def _command(ctx: click.Context, found: LaunchPlan) -> list[str]:
    """That launches the training on the best nodes."""
    best = found.best
    script = [ctx.meta["script"]] if ctx.meta["script"] else []
    args = ctx.meta["args"]
    only = [word for node in best.nodes for word in ("--only", node)]
    ours = [*_of_a_launch(ctx.meta["ours"]), *only, "--nodes", str(len(best.nodes))]
    return ["ugro", "launch", *script, *ours, *(["--", *args] if args else [])]


def _of_a_launch(words: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        name, has_value, _ = word.partition("=")
        if name not in _NOT_OF_A_LAUNCH:
            yield word
        elif _NOT_OF_A_LAUNCH[name] and not has_value:
            next(rest, None)
