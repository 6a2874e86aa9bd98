"""A sweep as one HTML file that needs no server and loads nothing: history, parallel coordinates, importances, a table.

Pure: a report in, a text out. Every text that comes from a job or a file is escaped.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from ugro.core.sweep import Importance, SweepReport, Trial, TrialState

_WIDTH, _HEIGHT, _EDGE = 860, 260, 46
_MUCH = 50
_MOST_LINES = 500  # in the parallel coordinates: the best ones
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733;
  background: #fff }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #dde3ea } th { text-align: left }
.wide { overflow-x: auto } svg { width: 100%; height: auto }
svg text { font-size: 11px; fill: #5b6875 } .axis { stroke: #9aa7b4 } .all { fill: #9aa7b4 } .best { fill: #b3261e }
.line { fill: none; stroke: #1f6feb; stroke-width: 2 } .way { fill: none; stroke: #1f6feb; stroke-opacity: .35 }
.way.top { stroke: #b3261e; stroke-opacity: 1; stroke-width: 2.5 } .bar { fill: #1f6feb }
@media (prefers-color-scheme: dark) { body { background: #12171d; color: #dde5ee } th, td { border-color: #2b3540 }
  svg text { fill: #9fb0c0 } a { color: #7db3ff } }
"""


def page(found: SweepReport, importances: Sequence[Importance]) -> str:
    title = f"Sweep {found.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in _facts(found)),
        *_section("History", history(found), "Each point is a trial; the line is the best value so far."),
        *_section("Parallel coordinates", coordinates(found), "Each line is a trial; the best one is red."),
        *_section("Importance", _bars(importances), "The share of the differences that each parameter explains."),
        "<h2>Trials</h2>",
        f'<p><a download="{escape(found.name)}.csv" href="{_csv_link(found)}">Download as CSV</a></p>',
        f'<div class="wide" tabindex="0">{_table(found)}</div>',
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _facts(found: SweepReport) -> Iterator[str]:
    yield f"{found.method}, {len(found.trials)} trials, {found.state}{f': {found.reason}' if found.reason else ''}"
    if (best := found.best_trial) is not None:
        values = ", ".join(f"{name} = {_shown(best.values.get(name))}" for name in found.parameters)
        yield f"Best: trial {best.number} (job {best.job}), {found.metric} {_shown(best.best)}, with {values}"


def _section(title: str, drawing: str, says: str) -> list[str]:
    return [f"<h2>{title}</h2>", f"<p>{says}</p>", drawing] if drawing else []


def history(found: SweepReport) -> str:
    """An SVG: each trial, and the best so far; empty if there is nothing to draw."""
    measured = [trial for trial in found.trials if trial.best is not None]
    if len(measured) < 2:
        return ""
    values = [trial.best for trial in measured if trial.best is not None]
    low, high = min(values), max(values)
    choose = max if found.goal == "maximize" else min
    places = [
        (_across(at, len(measured)), _up(value, low, high), trial)
        for at, (trial, value) in enumerate(zip(measured, values, strict=True))
    ]
    so_far = [choose(values[: at + 1]) for at in range(len(values))]
    line = " ".join(f"{x:.1f},{_up(value, low, high):.1f}" for (x, _, _), value in zip(places, so_far, strict=True))
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{"best" if trial.number == found.best else "all"}">'
        f"<title>trial {trial.number}: {_shown(trial.best)} ({trial.state})</title></circle>"
        for x, y, trial in places
    )
    ends = _label(4, _HEIGHT - _EDGE, _shown(low)) + _label(4, _EDGE, _shown(high))
    return _svg(f'{ends}{dots}<polyline class="line" points="{line}"/>', f"{found.metric} of each trial")


def coordinates(found: SweepReport) -> str:
    """An SVG: a line for each trial through its parameters and its metric; empty if there is nothing to draw."""
    names = [*found.parameters, *([found.metric] if found.metric else [])]
    sign = -1 if found.goal == "maximize" else 1
    shown = [trial for trial in found.trials if not found.metric or trial.best is not None]
    shown.sort(key=lambda trial: sign * (trial.best or 0.0))
    shown = shown[:_MOST_LINES]
    if len(names) < 2 or not shown:
        return ""
    scales = {name: _Scale([_value(trial, name, found.metric) for trial in shown]) for name in names}
    axes = "".join(_axis(_across(at, len(names)), name, scales[name]) for at, name in enumerate(names))
    ways = "".join(
        f'<polyline class="way{" top" if trial.number == found.best else ""}" points="{_way(trial, found, scales)}">'
        f"<title>trial {trial.number}</title></polyline>"
        for trial in reversed(shown)
    )
    return _svg(ways + axes, "parameters and metric of each trial")


class _Scale:
    """Places on an axis: numbers by size, logarithmic if they differ much; all else in order of appearance."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.are_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
        texts = dict.fromkeys(json.dumps(one) for one in values)
        self.order: list[Any] = sorted(set(values)) if self.are_numbers else list(texts)
        self.is_log = self.are_numbers and 0 < _MUCH * self.order[0] <= self.order[-1]

    def up(self, value: Any) -> float:
        if self.is_log:
            return _up(math.log(value), math.log(self.order[0]), math.log(self.order[-1]))
        if self.are_numbers:
            return _up(value, self.order[0], self.order[-1])
        return _up(self.order.index(json.dumps(value)), 0, len(self.order) - 1)

    @property
    def ends(self) -> tuple[str, str]:
        low, high = self.order[0], self.order[-1]
        return (_shown(low), _shown(high)) if self.are_numbers else (json.loads(low), json.loads(high))


def _way(trial: Trial, found: SweepReport, scales: dict[str, _Scale]) -> str:
    places = (
        f"{_across(at, len(scales)):.1f},{scale.up(_value(trial, name, found.metric)):.1f}"
        for at, (name, scale) in enumerate(scales.items())
    )
    return " ".join(places)


def _axis(x: float, name: str, scale: _Scale) -> str:
    low, high = scale.ends
    line = f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_EDGE}" y2="{_HEIGHT - _EDGE}"/>'
    labels = ((_EDGE - 22, name), (_EDGE - 7, high), (_HEIGHT - _EDGE + 14, low))
    return line + "".join(_label(x, y, str(text), "middle") for y, text in labels)


def _bars(importances: Sequence[Importance]) -> str:
    rows = (
        f'<tr><th scope="row">{escape(one.parameter)}</th><td>{one.share:.3f}</td><td>'
        f'<svg viewBox="0 0 300 12" style="width:300px" aria-hidden="true">'
        f'<rect class="bar" width="{300 * one.share:.1f}" height="12"/></svg></td></tr>'
        for one in importances
    )
    return f"<table>{''.join(rows)}</table>" if importances else ""


def _table(found: SweepReport) -> str:
    header, *lines = rows(found)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def rows(found: SweepReport) -> Iterator[list[str]]:
    metric = [f"{found.metric} best", f"{found.metric} last", "step"] if found.metric else []
    yield ["trial", "job", "state", *found.parameters, *metric, "seconds", "reason"]
    for trial in found.trials:
        measured = [_shown(trial.best), _shown(trial.last), _shown(trial.step)] if found.metric else []
        values = [_shown(trial.values.get(name)) for name in found.parameters]
        about = [str(trial.number), _shown(trial.job), str(trial.state)]
        yield [*about, *values, *measured, _shown(trial.took_s), _reason(trial)]


def _reason(trial: Trial) -> str:
    return trial.reason if trial.state is not TrialState.RUNNING else ""


def _csv_link(found: SweepReport) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows(found))
    return f"data:text/csv;base64,{base64.b64encode(text.getvalue().encode()).decode()}"


def _value(trial: Trial, name: str, metric: str | None) -> Any:
    return trial.best if name == metric and name not in trial.values else trial.values.get(name)


def _across(at: int, count: int) -> float:
    return _EDGE + 20 + at * (_WIDTH - 2 * _EDGE - 40) / max(1, count - 1)


def _up(value: float, low: float, high: float) -> float:
    share = 0.5 if high == low else (value - low) / (high - low)
    return _HEIGHT - _EDGE - share * (_HEIGHT - 2 * _EDGE)


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text[:24])}</text>'


def _svg(inner: str, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{inner}</svg>'


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
