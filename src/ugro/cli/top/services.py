"""Draws the services of ``ugro top``: a line for each, and one below it where something is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from ugro.cli.output import Cell, Output, Style
from ugro.core.service import Phase, ServiceReport
from ugro.core.support.quantity import format_duration

_HEADER = ("", "SERVICE", "STATE", "REPLICAS", "REQ/S", "P50", "P99", "WAITING", "ERRORS", "ADDRESS")
_SPARE = ("ADDRESS", "P50")
_SIGNS: dict[Phase, tuple[str, Style]] = {
    Phase.READY: ("●", "good"),
    Phase.DEGRADED: ("!", "warn"),
    Phase.DOWN: ("✗", "bad"),
    Phase.FAILED: ("✗", "bad"),
}


def service_lines(output: Output, found: Sequence[ServiceReport]) -> list[str]:
    below = [Cell(output.cut_below(_about(one)), _SIGNS.get(one.state, ("", "dim"))[1] or "dim") for one in found]
    drawn = output.table_groups(_HEADER, [_row(one) for one in found], spare=_SPARE, below=below)
    return [line for lines in drawn for line in lines]


def _row(one: ServiceReport) -> list[Cell]:
    sign, style = _SIGNS.get(one.state, ("◌", ""))
    traffic = one.traffic
    return [
        Cell(sign, style),
        Cell(one.name, "bold"),
        Cell(one.state, style),
        _number(f"{one.ready}/{one.wanted}"),
        _number(f"{traffic.rate:.3g}"),
        _seconds(traffic.p50_s),
        _seconds(traffic.p99_s),
        _number(str(traffic.queued)),
        _number(str(traffic.errors), "warn" if traffic.errors else ""),
        Cell(one.url),
    ]


def _about(one: ServiceReport) -> str:
    """Nothing for one that is ready."""
    return one.update or ("" if one.state is Phase.READY else one.reason)


def _seconds(value: float | None) -> Cell:
    return _number("" if value is None else format_duration(value))


def _number(text: str, style: Style = "") -> Cell:
    return Cell(text, style, is_number=True)
