"""``ugro usage``: what users and groups have used, against their quotas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from ugro.cli.jobs.describe import local_time
from ugro.cli.jobs.logs import MOMENT
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import Session, json_option, pass_session
from ugro.features.quotas.model import WINDOWS_S, Limit
from ugro.features.quotas.operations import GetUsage
from ugro.kernel.jobs.records import QuotaUse, UsageReport, UsageRow
from ugro.kernel.support.quantities import format_cost, format_duration, format_energy

_HEADER = ("NAME", "JOBS", "GPU-HOURS", "CPU-HOURS", "ENERGY", "COST", "GPUS NOW", "QUEUED", "SHARE", "QUOTA")
_J_PER_WH = 3600.0
_NEARLY = 0.9


@click.command()
@click.option("--user", help="Show only this user, and the user's groups.")
@click.option(
    "--since",
    type=MOMENT,
    metavar="TIME",
    default="7d",
    show_default=True,
    help="Count what is newer than this: 7d (ago), or a time such as 2030-01-31T08:00. Whole hours are counted.",
)
@json_option
@pass_session
def usage(session: Session, user: str | None, since: float) -> None:
    """Show what users and groups have used, against their quotas.

    GPU-hours and CPU-hours are those of devices that jobs held, whether or not they were busy; jobs that run now are
    included. CPU-hours are those of jobs without GPUs. SHARE is what fair share counts of the past: devices on average,
    divided by the user's weight. Devices that are held now are added to it; who has the least comes first.

    \b
    Example:
      ugro usage --user ann --since 30d
    """
    output = session.output
    report = session.client().ask(GetUsage(max(0.0, since), user)).usage
    if output.is_json:
        output.document({"usage": report})
        return
    rows = [*report.users, *report.groups]
    if not rows:
        output.note("no use yet")
        return
    output.table(_HEADER, [_row(one, report) for one in rows], spare=("CPU-HOURS", "COST", "SHARE"))
    _say_more(output, report)


def _row(row: UsageRow, report: UsageReport) -> list[Cell]:
    is_group = row.weight is None
    share = "" if is_group else f"{(row.average or 0.0) / (row.weight or 1.0):.2f}"
    cost = "" if row.cost is None else format_cost(row.cost, report.currency or "")
    return [
        Cell(f"group {row.name}" if is_group else row.name, "id"),
        Cell(str(row.jobs)),
        Cell(_hours(row.gpu_hours)),
        Cell(_hours(row.cpu_hours)),
        Cell(format_energy(row.energy_wh * _J_PER_WH) if row.energy_wh else "–"),
        Cell(cost or "–"),
        Cell(f"{row.gpus:g}"),
        Cell(str(row.queued)),
        Cell(share or "–"),
        Cell(", ".join(_quota(one) for one in row.quota) or "–", _style(row.quota)),
    ]


def _hours(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}"


def _quota(one: QuotaUse) -> str:
    if one.limit == Limit.MAX_TIME_LIMIT:
        return f"{one.limit} {format_duration(one.most)}"
    if one.used is None:
        return f"{one.limit} {one.most:g}"
    used = _hours(one.used) if one.limit in WINDOWS_S else f"{one.used:g}"
    return f"{one.limit} {used}/{one.most:g}"


def _style(quota: Sequence[QuotaUse]) -> Style:
    return "warn" if any(one.used is not None and one.used >= _NEARLY * one.most for one in quota) else ""


def _say_more(output: Output, report: UsageReport) -> None:
    since = local_time(report.since) if output.is_terminal else report.since
    output.note(f"since {since}; past use counts half after {format_duration(report.half_life_s)}")
    for text in _notes(report):
        output.note(text)


def _notes(report: UsageReport) -> Iterator[str]:
    for group in report.groups:
        if group.note is not None:
            yield f"group {group.name}: {group.note}"
        elif not group.members:
            yield f"group {group.name} has no members"
