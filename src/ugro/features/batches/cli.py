"""``ugro map``: runs a function over many items, with the results in a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ugro.cli.jobs.options import NodeNumber
from ugro.cli.output import Cell, Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.quantities import format_duration, parse_duration

if TYPE_CHECKING:
    from ugro.features.batches.mapping import MapReport, MapWish
    from ugro.features.batches.model import Estimate, Place
    from ugro.features.batches.pool import Pool
    from ugro.features.batches.run import Progress


# --- options ----------------------------------------------------------------------------------------------------------
# Options that ``ugro map`` and ``ugro estimate`` have in common.


MEASURED = ("local", "ray")
ENGINES = (*MEASURED, "jobs")
_FLAGS = {"nodes": "nodes", "options": "job-option"}


def input_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "A file with one JSON value per line: the items. - is stdin."
    return click.option("--input", "input_", required=True, type=click.Path(), help=text)(command)


def shared_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Pass FILE to every call by this name: the value of a .json file, the bytes of any other."
    return click.option("--shared", multiple=True, metavar="NAME=FILE", help=text)(command)


def shared_of(words: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        name, _, file = word.partition("=")
        if not name.isidentifier() or not file:
            raise UsageError(f"--shared {word}: expected NAME=FILE", hint="for example: --shared table=table.json")
        found[name] = file
    return found


def job_options_of(words: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise UsageError(f"--job-option {word}: expected NAME=VALUE", hint="for example: --job-option memory=4GB")
        found[name.replace("-", "_")] = value
    return found


def open_pool(session: Session, engine: str, **wanted: Any) -> Pool:
    """``wanted``: ``workers``, and for jobs ``nodes`` and ``options``.

    What functions print goes to stderr, on Ray nowhere, on jobs to their logs: stdout is for the result.
    """
    if given := [name for name in ("nodes", "options") if wanted.get(name) and engine != "jobs"]:
        raise UsageError(f"--{_FLAGS[given[0]]} is for --engine jobs, and this is {engine}", hint="leave it out")
    if engine == "local":
        from ugro.features.batches.estimating import here

        return here(wanted.get("workers"))
    from ugro.features.batches.client import PoolWish, open_pool

    client = session.client(uses_nodes=True) if engine == "jobs" else session.new_client()
    return open_pool(client, PoolWish(engine, shows_output=False, **wanted))


# --- estimate ---------------------------------------------------------------------------------------------------------
# ``ugro estimate``: says whether sharing work out pays, before it is run.


@click.command()
@click.argument("target", metavar="SCRIPT.py:FUNCTION")
@input_option
@click.option("--engine", type=click.Choice(MEASURED), default="local", show_default=True, help="Also measure on Ray.")
@shared_option
@json_option
@pass_session
def estimate(session: Session, target: str, input_: str, engine: str, shared: tuple[str, ...]) -> int:
    """Predict how long a map takes, here and on a cluster.

    Times a few items from all over the input, for some seconds, and what a pool of processes costs. Nothing is written.
    With --engine ray, it also measures the running Ray cluster. Otherwise, if the agent runs and has a cluster, its
    nodes count with their cores, the measured speed of their network, and assumed overheads.

    \b
    Example:
      ugro estimate score.py:score --input items.jsonl
    """
    from ugro.features.batches.estimating import run_estimate

    is_ray = engine == "ray"
    found = run_estimate(
        target,
        input_,
        shared_of(shared),
        cluster=partial(open_pool, session, engine) if is_ray else None,
        others=() if is_ray else _cluster(session),
        on_progress=session.output.progress,
    )
    session.output.end_progress()
    _show(session.output, found)
    return 0


def _cluster(session: Session) -> tuple[Place, ...]:
    from ugro.features.batches.client import cluster_place

    found = cluster_place(session.new_client())
    return (found,) if found else ()


def _show(output: Output, found: Estimate) -> None:
    if output.is_json:
        places = [{"place": one.place.name, "seconds": one.seconds, "bound": one.bound} for one in found.predictions]
        document = {"places": places, "recommended": found.recommended.place.name, "reason": found.reason}
        output.document({"estimate": {**document, "error": found.sample.error, "sampled": len(found.sample.costs_s)}})
        return
    rows = []
    for number, one in enumerate(found.predictions):
        is_best = number == found.best
        remark = "recommended" if is_best else "partly assumed" if one.place.is_assumed else ""
        name = Cell(one.place.name, "good" if is_best else "")
        slots = Cell(str(one.place.slots), is_number=True)
        rows.append([name, slots, Cell(format_duration(one.seconds)), Cell(remark)])
    output.table(["PLACE", "PROCESSES", "TIME", "REMARK"], rows)
    spread = f"± {max(1, round(100 * found.sample.error))} %"
    output.text(f"{found.reason} ({len(found.sample.costs_s):,} items timed, {spread})")


# --- map --------------------------------------------------------------------------------------------------------------


_MOST_NODES = 6  # shown
_JOB_OPTION = "An option of the jobs of --engine jobs, as ugro run has it, such as memory=4GB. Can be repeated."


@click.command("map")
@click.argument("target", metavar="SCRIPT.py:FUNCTION")
@input_option
@click.option("--output", required=True, type=click.Path(), help="The file that gets one line of JSON per result.")
@click.option("--resume", is_flag=True, help="Continue an interrupted map, and try again what failed.")
@click.option("--retries", type=click.IntRange(0, 100), default=1, show_default=True, help="Of an item that fails.")
@click.option("--timeout", metavar="DURATION", help="End an item that takes longer, such as 30s.")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True, help="Where items are run.")
@click.option("--workers", type=click.IntRange(1, 10_000), help="How many processes. Default: one for each core.")
@click.option("--nodes", type=NodeNumber(10_000), metavar="N|all", help="Nodes for --engine jobs. Default: all.")
@click.option("--job-option", multiple=True, metavar="NAME=VALUE", help=_JOB_OPTION)
@click.option("--unordered", is_flag=True, help="Write results as they come. Their index says whose they are.")
@shared_option
@json_option
@pass_session
def map_(session: Session, /, target: str, engine: str, **fields: object) -> int:
    """Run a function over many items, in batches that need no tuning.

    FUNCTION is called with the value of each line of the input. Results are written as lines such as
    {"index": 3, "result": 0.5}, failures as {"index": 4, "error": {…}}; the others go on. After an interruption,
    even by kill -9, --resume runs what has no result yet. --engine ray uses the Ray cluster of RAY_ADDRESS, or the one
    on this machine; --engine jobs runs a job on each node of the cluster, and needs no Ray. Exit code 1: some items
    failed.

    \b
    Examples:
      ugro map score.py:score --input items.jsonl --output scores.jsonl
      ugro map score.py:score --input items.jsonl --output scores.jsonl --resume
      ugro map score.py:score --input items.jsonl --output scores.jsonl --engine jobs --nodes 3
    """
    from ugro.features.batches.mapping import run_map

    wish = _wish(target, fields)
    session.output.progress("starting")
    wanted = {name: fields[name] for name in ("workers", "nodes")}
    options = job_options_of(tuple(fields["job_option"]))  # type: ignore[arg-type]  # of click: a tuple
    begin = partial(open_pool, session, engine, options=options, **wanted)
    report = run_map(wish, begin, partial(_show_progress, session.output))
    session.output.end_progress()
    _map_show(session.output, report)
    return 1 if report.failed else 0


def _wish(target: str, fields: dict[str, object]) -> MapWish:
    from ugro.features.batches.mapping import MapWish

    timeout = fields["timeout"]
    try:
        timeout_s = parse_duration(str(timeout)) if timeout is not None else None
    except ValueError as error:
        raise UsageError(f"--timeout: {error}") from error
    if timeout_s == 0:
        raise UsageError("--timeout: expected more than 0")
    return MapWish(
        target,
        str(fields["input_"]),
        str(fields["output"]),
        resumes=bool(fields["resume"]),
        is_ordered=not fields["unordered"],
        retries=int(str(fields["retries"])),
        timeout_s=timeout_s,
        shared=shared_of(tuple(fields["shared"])),  # type: ignore[arg-type]  # of click: a tuple
    )


def _show_progress(output: Output, now: Progress) -> None:
    of = f" of {now.total:,}" if now.total is not None else ""
    parts = [f"{now.done:,}{of} items", f"{now.per_s:,.3g}/s" if now.per_s < 1000 else f"{now.per_s:,.0f}/s"]
    if now.left_s is not None:
        parts.append(f"{format_duration(round(now.left_s))} left")
    if now.failed:
        parts.append(f"{now.failed:,} failed")
    output.progress(", ".join(parts) + _shares(now))


def _shares(now: Progress) -> str:
    whole = sum(now.nodes.values())
    if len(now.nodes) < 2 or not whole:
        return ""
    most = sorted(now.nodes.items(), key=lambda one: -one[1])[:_MOST_NODES]
    return " · " + ", ".join(f"{node} {100 * count / whole:.0f} %" for node, count in most)


def _map_show(output: Output, report: MapReport) -> None:
    if output.is_json:
        output.document({"map": report})
        return
    rate = f"{report.items:,} item{'' if report.items == 1 else 's'} in {format_duration(report.seconds)}"
    before = f", {report.resumed:,} were done before" if report.resumed else ""
    output.text(f"{rate}{before}: {report.output}")
    if report.is_script_changed:
        what = f"the script has changed: {report.resumed:,} results are of the version before"
        output.warn(what, "if they would differ now, run it again with another output")
    if report.failed:
        what = f"{report.failed:,} item{' has' if report.failed == 1 else 's have'} no result; {report.first_failure}"
        output.warn(what, f"all failures are in {report.output}; try them again with --resume")
