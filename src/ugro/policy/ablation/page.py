"""An experiment as one HTML file that needs no server and loads nothing. Pure; every text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ugro.policy.ablation.figures import bars
from ugro.policy.ablation.measure import METRICS, SETTLING, Metric, Moment
from ugro.policy.ablation.statistics import Band, Row, Run, bands, rows
from ugro.policy.ablation.tables import NOT_MEASURED, Cells, of_bands, of_metric, of_runs, problems, summary
from ugro.policy.sweep.html import Assets, csv_button, table, whole

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
