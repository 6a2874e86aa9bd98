"""``ugro map``: runs a function over many items, with the results in a file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from ugro.cli.batch.options import ENGINES, input_option, job_options_of, open_pool, shared_of, shared_option
from ugro.cli.node_number import NodeNumber
from ugro.cli.output import Output
from ugro.cli.session import Session, json_option, pass_session
from ugro.core.errors import UsageError
from ugro.core.support.quantity import format_duration, parse_duration

if TYPE_CHECKING:
    from ugro.batch.mapping import MapReport, MapWish
    from ugro.batch.run import Progress

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
    from ugro.batch.mapping import run_map

    wish = _wish(target, fields)
    session.output.progress("starting")
    wanted = {name: fields[name] for name in ("workers", "nodes")}
    options = job_options_of(tuple(fields["job_option"]))  # type: ignore[arg-type]  # of click: a tuple
    begin = partial(open_pool, session, engine, options=options, **wanted)
    report = run_map(wish, begin, partial(_show_progress, session.output))
    session.output.end_progress()
    _show(session.output, report)
    return 1 if report.failed else 0


def _wish(target: str, fields: dict[str, object]) -> MapWish:
    from ugro.batch.mapping import MapWish

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


def _show(output: Output, report: MapReport) -> None:
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
