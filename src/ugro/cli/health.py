"""``ugro health``: probes nodes and shows a table."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from ugro.cli import candidates
from ugro.cli.output import Cell, Output, Style
from ugro.cli.session import Session, json_option, pass_session
from ugro.client.client import Client
from ugro.kernel.links.model import Gpu, NodeReport, Status, by_name
from ugro.kernel.links.operations import CheckHealth
from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.quantities import format_duration, format_size

SIGNS: dict[Status, tuple[str, Style]] = {
    Status.HEALTHY: ("✓", "good"),
    Status.DEGRADED: ("!", "warn"),
    Status.UNHEALTHY: ("✗", "bad"),
    Status.UNREACHABLE: ("?", "bad"),
    Status.GOING_TO_SLEEP: ("z", "dim"),
    Status.ASLEEP: ("z", "dim"),
    Status.WAKING: ("z", "warn"),
}
_HEADER = (
    *("", "NODE", "STATUS", "SCORE", "RTT", "LOAD", "CPU", "MEM", "DISK"),
    *("GPU", "USE", "VRAM", "TEMP", "POWER", "NOTE"),
)
_SPARE = ("RTT", "DISK", "POWER", "CPU", "LOAD", "MEM", "SCORE", "TEMP", "USE", "VRAM", "GPU", "STATUS")
_SHORTEST_S, _LONGEST_S = 0.2, 3600  # between refreshes
_SHORT_ABSENCE_S = 60


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=candidates.nodes)
@click.option("--watch", "-w", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between refreshes, 0.2 to 3600.")
@json_option
@pass_session
def health(session: Session, nodes: tuple[str, ...], watch: bool, interval: float) -> int:
    """Check the health of nodes.

    Probes NODES (names, @all or @label; default: all) and shows load, memory, disks and GPUs, with a score from 0 to
    100.

    Exit code: 0 if all are healthy, 1 if some are not, 5 if some cannot be reached.

    \b
    Examples:
      ugro health
      ugro health @fast --watch
    """
    check_interval(interval)
    client = session.client(uses_nodes=True)
    session.output.progress("probing the nodes")
    if watch:
        return _watch(session.output, client, nodes, interval)
    reports, elapsed_s = _check(session.output, client, nodes)
    show(session.output, reports)
    session.output.note(summary(reports, elapsed_s))
    if (agent := client.agent()).disk_problem:
        session.output.warn(agent.disk_problem, agent.disk_hint)
    return exit_code(reports)


def check_interval(seconds: float) -> None:
    if not _SHORTEST_S <= seconds <= _LONGEST_S:  # also refuses NaN
        problem = f"--interval: expected {_SHORTEST_S} to {_LONGEST_S} seconds"
        raise UsageError(problem, hint="for example: --interval 5")


def show(output: Output, reports: Sequence[NodeReport]) -> None:
    if output.is_json:
        output.document({"nodes": reports})
        return
    output.table(_HEADER, rows(reports, is_each_whole=not output.is_terminal), spare=_SPARE)
    for report in reports:
        if report.second_name:
            output.note(f"{report.name}: {report.second_name}; remove the name: ugro node rm {report.name}")
        elif report.status is Status.UNREACHABLE and report.hint:
            output.note(f"{report.name}: {report.hint}")


def rows(reports: Sequence[NodeReport], *, is_each_whole: bool = False) -> list[list[Cell]]:
    """One row per GPU. For people, only a node's first row has its own values; for programs, each row has them."""
    return [row for report in reports for row in _rows(report, is_each_whole=is_each_whole)]


def summary(reports: Sequence[NodeReport], elapsed_s: float) -> str:
    machines = _machines(reports)
    counts: list[tuple[str, int]] = [
        *((status, sum(report.status is status for report in machines)) for status in Status),
        ("not used", len(reports) - len(machines)),
    ]
    words = " · ".join(f"{count} {status}" for status, count in counts if count)
    return f"{words}   checked {len(reports)} in {format_duration(elapsed_s)}"


def exit_code(reports: Sequence[NodeReport]) -> int:
    statuses = {report.status for report in _machines(reports)}
    if Status.UNREACHABLE in statuses:
        return 5
    return 0 if all(status is Status.HEALTHY or status.is_asleep for status in statuses) else 1


def _machines(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Each machine once."""
    return [report for report in reports if report.same_as is None]


def _check(output: Output, client: Client, nodes: Sequence[str]) -> tuple[list[NodeReport], float]:
    total = f" of {client.agent().nodes}" if output.shows_progress and not nodes else ""
    started = time.monotonic()
    reports = []
    for report in client.follow(CheckHealth(tuple(nodes))):
        reports.append(report)
        output.progress(f"{len(reports)}{total} nodes have answered")
    return sorted(reports, key=lambda report: by_name(report.name)), time.monotonic() - started


def _watch(output: Output, client: Client, nodes: Sequence[str], interval_s: float) -> int:
    reports: list[NodeReport] = []
    try:
        while True:
            reports, elapsed_s = _check(output, client, nodes)
            if output.is_json or not output.can_redraw:
                show(output, reports)
            else:
                footer = f"{summary(reports, elapsed_s)}   Ctrl-C ends"
                output.redraw(output.table_lines(_HEADER, rows(reports), spare=_SPARE), footer)
            time.sleep(interval_s)
    except KeyboardInterrupt:
        if output.is_terminal:
            output.text("")  # what comes next stands below the ^C
        return exit_code(reports)


def _rows(report: NodeReport, *, is_each_whole: bool) -> list[list[Cell]]:
    first = [*_state_cells(report), *_system_cells(report)]
    gpus = report.facts.gpus if report.facts else ()
    words = Cell(note(report), "" if report.status is Status.HEALTHY else SIGNS[report.status][1])
    if not gpus:
        return [[*first, *[Cell("")] * 5, words]]
    whole = [[*first, *_gpu_cells(gpu), words] for gpu in gpus]
    if is_each_whole:
        return whole
    return [whole[0], *([*[Cell("")] * len(first), *row[len(first) : -1], Cell("")] for row in whole[1:])]


def _state_cells(report: NodeReport) -> list[Cell]:
    sign, style = SIGNS[report.status]
    score = str(report.score) if report.facts else ""
    rtt = f"{report.link.rtt_s * 1000:.1f} ms" if report.link.rtt_s is not None else ""
    return [Cell(sign, style), Cell(report.name, "bold"), Cell(report.status, style), _number(score), _number(rtt)]


def _system_cells(report: NodeReport) -> list[Cell]:
    facts = report.facts
    if facts is None:
        return [_number("")] * 4
    disk = max((disk.used_ratio for disk in facts.disks), default=None)
    load = _number(f"{facts.load[0]:.2f}")
    return [load, _percent(facts.cpu_use_ratio), _percent(facts.memory_used_ratio), _percent(disk)]


def _gpu_cells(gpu: Gpu) -> list[Cell]:
    if gpu.error:
        return [Cell(f"{gpu.index} {gpu.model}", "bad"), *[_number("")] * 4]
    vram = ""
    if gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None:
        vram = f"{gpu.memory_used_bytes / 2**30:.1f}/{format_size(gpu.memory_total_bytes)}"
    temperature = f"{gpu.temperature_c:.0f} °C" if gpu.temperature_c is not None else ""
    power = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else ""
    name = Cell(f"{gpu.index} {gpu.model}")
    return [name, _percent(gpu.use_ratio), _number(vram), _number(temperature), _number(power)]


def note(report: NodeReport) -> str:
    notes = [report.error] if report.error else [reason.text for reason in report.reasons]
    if report.since and _absence_s(report.since, report.checked_at) > _SHORT_ABSENCE_S:
        notes.append(f"since {report.since[11:16]} UTC")
    if report.drained is not None:
        notes.insert(0, f"drained: {report.drained}" if report.drained else "drained")
    notes += [text for text in (report.power_note, report.owner_note) if text]
    if report.second_name:
        return "; ".join([report.second_name, *([report.error] if report.error else ())])
    notes += report.taken_gpus
    return "; ".join(notes)


def _absence_s(since: str, checked_at: str) -> float:
    from datetime import UTC, datetime  # most nodes are reachable

    until = datetime.fromisoformat(checked_at) if checked_at else datetime.now(UTC)
    return (until - datetime.fromisoformat(since)).total_seconds()


def _percent(ratio: float | None) -> Cell:
    return _number(f"{ratio * 100:.0f}%" if ratio is not None else "")


def _number(text: str) -> Cell:
    return Cell(text, is_number=True)
