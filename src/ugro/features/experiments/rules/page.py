"""An experiment as one HTML file that needs no server and loads nothing. Pure; every text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ugro.features.experiments.rules.measure import (
    METRICS,
    SETTLING,
    Band,
    Estimate,
    Metric,
    Moment,
    Row,
    Run,
    bands,
    is_measured,
    rows,
)
from ugro.kernel.telemetry.records import StepRecord
from ugro.web.report import Assets, csv_button, table, whole

# --- tables -----------------------------------------------------------------------------------------------------------
# The figures of an experiment as tables: for the command line, for the page, and as CSV. Pure.


NOT_MEASURED = "not measured"
Cells = Sequence[str]


def shown(one: Estimate | None, metric: Metric) -> str:
    """Such as ``312 ± 14 samples/s``."""
    if one is None:
        return NOT_MEASURED
    unit = f" {metric.unit}" if metric.unit else ""
    return f"{spread(one, metric.scale)}{unit}"


def spread(one: Estimate, scale: float = 1.0) -> str:
    if one.half is None:
        return number(one.mean * scale)
    # Two digits of the interval say how many of the mean count.
    half = one.half * scale
    decimals = _decimals(10 * half) if half else _decimals(one.mean * scale)
    return f"{one.mean * scale:.{decimals}f} ± {one.half * scale:.{decimals}f}"


def number(value: float) -> str:
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    """Three digits that count, and no more than four decimals."""
    size = abs(value)
    if size == 0:
        return 0
    return next((places for places, least in enumerate((100, 10, 1, 0.1)) if size >= least), 4)


def gain(row: Row) -> str:
    if row.ratio is None:
        return "1" if row.against is None and row.runs else ""
    return f"× {spread(row.ratio)}"


def summary(rows: Sequence[Row]) -> Iterator[list[str]]:
    yield ["model", "variant", "runs", "against", *(metric.title for metric in METRICS), "last shares"]
    for row in rows:
        compared = f"{gain(row)} ({row.against})" if row.ratio is not None else gain(row)
        values = [shown(row.values.get(metric.key), metric) for metric in METRICS]
        yield [row.model, row.variant, f"{row.runs} of {row.wanted}", compared, *values, _shares(row.shares)]


def of_metric(rows: Sequence[Row], metric: Metric) -> Iterator[list[str]]:
    yield ["model", "variant", f"mean{f' in {metric.unit}' if metric.unit else ''}", "95 % interval ±", "runs"]
    for row in rows:
        one = row.values.get(metric.key)
        if one is not None:
            half = "" if one.half is None else f"{one.half * metric.scale:.6g}"
            yield [row.model, row.variant, f"{one.mean * metric.scale:.6g}", half, str(one.count)]


def of_bands(bands: Sequence[Band], x: str) -> Iterator[list[str]]:
    yield ["variant", x, "loss", "low", "high"]
    for band in bands:
        for values in zip(band.xs, band.means, band.lows, band.highs, strict=True):
            yield [band.variant, *(f"{value:.6g}" for value in values)]


def of_runs(runs: Sequence[Run]) -> Iterator[list[str]]:
    """In the units of the values themselves: seconds, shares, joules."""
    keys = [metric.key for metric in METRICS]
    yield ["run", "job", "model", "variant", "seed", "state", *keys, "steps", "shares", "nodes", "reason"]
    for run in runs:
        one = run.figures
        values = [_plain(getattr(one, key)) for key in keys]
        about = [str(run.number), _plain(run.job), run.model, run.variant, str(run.seed), run.state]
        yield [*about, *values, str(one.steps), _shares(one.shares), " ".join(one.nodes), run.reason]


def of_steps(steps: Iterable[tuple[Run, Sequence[StepRecord]]]) -> Iterator[list[str]]:
    """Every step of every run; lists have a value for each rank."""
    lists = ("shares", "own_s", "waiting_s", "communication_s", "data_s")
    yield ["run", "job", "model", "variant", "seed", "step", "epoch", "samples", "loss", "step_s", "time", *lists]
    for run, records in steps:
        about = [str(run.number), _plain(run.job), run.model, run.variant, str(run.seed)]
        for one in records:
            plain = (one.step, one.epoch, one.samples, one.loss, one.step_s, one.time_s)
            ranks = (" ".join(_plain(value) for value in getattr(one, name)) for name in lists)
            yield [*about, *(_plain(value) for value in plain), *ranks]


def problems(runs: Sequence[Run]) -> Iterator[str]:
    """What a reader must know before believing the figures."""
    failed = [run for run in runs if run.state not in ("complete", "running", "pending")]
    for run in failed[:5]:
        why = f": {run.reason}" if run.reason else ""
        yield f"run {run.number} ({run.model}, {run.variant}, seed {run.seed}) is {run.state}{why}"
    if len(failed) > 5:
        yield f"and {len(failed) - 5} more runs"
    silent = [run for run in runs if run.state == "complete" and not is_measured(run)]
    if silent:
        yield f"{len(silent)} complete runs have recorded no steps"


def _shares(shares: Sequence[int]) -> str:
    return " / ".join(str(share) for share in shares)


def _plain(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) and abs(value) < 1e8 else str(value)


# --- figures ----------------------------------------------------------------------------------------------------------
# Bars with 95 % intervals as SVG. Pure: rows in, a text out; every text in it is escaped.


_WIDTH = 620
_LABELS = 190  # room for the names
_VALUES = 100  # room for the numbers
_LINE = 22
_HEAD = 24  # the line of a model's name
_CAP = 4  # of an interval's ends


def bars(rows: Sequence[Row], metric: Metric) -> str:
    """Grouped by model, all on one scale that begins at 0."""
    known = [(row, one) for row in rows if (one := row.values.get(metric.key)) is not None]
    most = max((max(one.high, one.mean) for _, one in known), default=0.0) or 1.0
    models = list(dict.fromkeys(row.model for row, _ in known))
    height = len(models) * _HEAD + len(known) * _LINE + _LINE
    parts = list(_drawn(known, models, metric, most))
    sentence = escape(_sentence(known, metric))
    return (
        f'<svg class="bars" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{sentence}">'
        f"{''.join(parts)}{_axis(height, metric, most)}</svg>"
    )


def _drawn(
    known: Sequence[tuple[Row, Estimate]], models: Sequence[str], metric: Metric, most: float
) -> Iterator[str]:
    y = 0
    for model in models:
        yield f'<text x="0" y="{y + 16}" font-weight="600">{escape(model)}</text>'
        y += _HEAD
        for row, one in known:
            if row.model == model:
                yield _bar(row, one, metric, most, y)
                y += _LINE


def _bar(row: Row, one: Estimate, metric: Metric, most: float, y: int) -> str:
    length, middle = _place(one.mean, most) - _LABELS, y + _LINE // 2
    kind = "mean is-baseline" if row.against is None else "mean"
    name = row.variant if len(row.variant) <= 32 else f"{row.variant[:31]}…"
    text = (
        f'<text x="{_LABELS - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>'
        f'<rect class="{kind}" x="{_LABELS}" y="{y + 4}" width="{max(0.0, length):.1f}" height="{_LINE - 8}"/>'
    )
    if one.half is not None:
        low, high = _place(max(0.0, one.low), most), _place(one.high, most)
        text += _line(low, middle, high, middle)
        text += "".join(_line(x, middle - _CAP, x, middle + _CAP) for x in (low, high))
    label = escape(spread(one, metric.scale))  # the axis has the unit
    return text + f'<text class="faint" x="{_WIDTH}" y="{middle + 4}" text-anchor="end">{label}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="interval" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _axis(height: int, metric: Metric, most: float) -> str:
    y = height - _LINE + 4
    end = f"{number(most * metric.scale)}{f' {metric.unit}' if metric.unit else ''}"
    return (
        f'<line class="axis" x1="{_LABELS}" y1="{y}" x2="{_WIDTH - _VALUES}" y2="{y}"/>'
        f'<text class="faint" x="{_LABELS}" y="{y + 14}">0</text>'
        f'<text class="faint" x="{_WIDTH - _VALUES}" y="{y + 14}" text-anchor="end">{escape(end)}</text>'
    )


def _place(value: float, most: float) -> float:
    return _LABELS + value / most * (_WIDTH - _VALUES - _LABELS)


def _sentence(known: Sequence[tuple[Row, Estimate]], metric: Metric) -> str:
    """For screen readers."""
    said = [f"{row.model} {row.variant} {shown(one, metric)}" for row, one in known]
    return f"{metric.title}, {metric.meaning}: {'; '.join(said) or 'nothing measured'}."


# --- page -------------------------------------------------------------------------------------------------------------


_OVER: tuple[tuple[str, str, Callable[[Moment], float]], ...] = (
    ("samples", "samples", lambda one: float(one.samples)),
    ("seconds", "time", lambda one: one.seconds),
)


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    state: str
    reason: str
    created_at: str
    machine: Sequence[str]  # lines about the nodes it ran on
    runs: Sequence[Run]
    file: str  # with which it can be run again


def page(found: Experiment, assets: Assets) -> str:
    compared = rows(found.runs)
    curves = list(_curves(found.runs))
    tables = {"Summary": list(summary(compared)), "Runs": list(of_runs(found.runs))}
    summed, each = (_Panel(name, "", table(name, lines), lines) for name, lines in tables.items())
    parts = [
        _about(found),
        summed.html,
        f'<div class="figures">{"".join(_figure(compared, metric).html for metric in METRICS)}</div>',
        *(_curve_panel(one).html for one in curves),
        each.html,
        _Panel("Run it again", "", _again(found)).html,
    ]
    main = f'<div class="stack">{"".join(parts)}</div>'
    shown = ("experiment-curves", [one.document for one in curves])
    return whole(f"Experiment {found.name}", main, shown, assets)


def facts(found: Experiment) -> Iterator[str]:
    done = sum(run.state == "complete" for run in found.runs)
    reason = f": {found.reason}" if found.reason else ""
    seeds = len({run.seed for run in found.runs})
    yield f"{done} of {len(found.runs)} runs are complete; the experiment is {found.state}{reason}."
    yield from found.machine
    over = "of one seed" if seeds == 1 else f"over {seeds} seeds, with 95 % intervals (Student's t)"
    yield f"Values are means {over}. Ratios compare runs with the same seed."
    yield f"The first {SETTLING} steps of a run do not count for speed, load and waiting."
    if seeds < 3:
        yield "With fewer than three seeds, differences say little: use --seeds 3 or more."
    yield from (f"Mind: {line}." for line in problems(found.runs))


def _about(found: Experiment) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in facts(found))
    created = f'<p class="muted">Created {escape(found.created_at)}</p>'
    return f'<section class="panel" aria-label="About"><ul class="notes">{lines}</ul>{created}</section>'


def _figure(compared: Sequence[Row], metric: Metric) -> _Panel:
    if not any(metric.key in row.values for row in compared):
        return _Panel(metric.title, metric.meaning, f'<p class="muted">{NOT_MEASURED}: {escape(metric.lack)}</p>')
    better = "more is better" if metric.more_is_better else "less is better"
    numbers = list(of_metric(compared, metric))
    exact = f'<details class="numbers"><summary>Data table</summary>{table(metric.title, numbers)}</details>'
    drawn = f'<div class="scroll" tabindex="0" role="group" aria-label="Figure">{bars(compared, metric)}</div>'
    return _Panel(metric.title, f"{metric.meaning}; {better}", drawn + exact, numbers)


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    about: str
    body: str  # HTML
    numbers: Sequence[Cells] = ()

    @property
    def html(self) -> str:
        key = "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())
        about = f'<span class="muted small">{escape(self.about)}</span>' if self.about else ""
        save = f'<span class="push">{csv_button(key, self.numbers)}</span>' if self.numbers else ""
        return (
            f'<section class="panel" aria-labelledby="of-{key}"><header><h2 id="of-{key}">{escape(self.title)}</h2>'
            f"{about}{save}</header>{self.body}</section>"
        )


@dataclass(frozen=True, slots=True)
class _Curve:
    place: str
    title: str
    over: str
    found: Sequence[Band]
    document: dict[str, Any]


def _curves(runs: Sequence[Run]) -> Iterator[_Curve]:
    for at, model in enumerate(dict.fromkeys(run.model for run in runs)):
        for x, over, x_of in _OVER:
            found = bands(runs, model, x_of)
            if found:
                place, title = f"curve-{at}-{x}", f"{model}: loss over {over}"
                series = [
                    {"name": one.variant, "xs": one.xs, "mins": one.lows, "maxs": one.highs, "means": one.means}
                    for one in found
                ]
                yield _Curve(place, title, over, found, {"place": place, "label": title, "x": x, "series": series})


def _curve_panel(one: _Curve) -> _Panel:
    numbers = list(of_bands(one.found, one.over))
    body = f'<div class="curve" id="{one.place}"></div><noscript>{table(one.title, numbers)}</noscript>'
    return _Panel(one.title, "mean over seeds, with 95 % intervals", body, numbers)


def _again(found: Experiment) -> str:
    return (
        "<p>Save this as <code>experiment.yaml</code>, which is also beside this file, and run "
        "<code>ugro experiment run -f experiment.yaml</code> on the same nodes.</p>"
        f'<pre class="report-file" tabindex="0">{escape(found.file)}</pre>'
    )
