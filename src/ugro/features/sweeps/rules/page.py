"""A sweep as one HTML file that needs no server and loads nothing: its charts, as in the dashboard, and a table.

Pure: a report in, a text out. Every text that comes from a job or a file is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ugro.features.sweeps.model import Importance, Scale, SweepReport, Trial, TrialState
from ugro.features.sweeps.rules.spec import dumps, is_number
from ugro.web.report import Assets, csv_button, table, whole

# --- charts -----------------------------------------------------------------------------------------------------------
# What the charts of a sweep show, for ``web/static/sweep/``: axes, and each trial with its place on them. Pure.


MOST_TRIALS = 5000  # the newest, and the best
_MUCH = 50  # numbers that differ so much have a logarithmic axis


def document(found: SweepReport, *, has_jobs: bool) -> dict[str, Any]:
    """``has_jobs``: trials have links to the pages of their jobs."""
    shown = _shown(found)
    declared = {one.name: one for one in found.scales}
    axes = [_Axis(declared.get(name), name, [trial.values.get(name) for trial in shown]) for name in found.parameters]
    return {
        "id": found.id,
        "name": found.name,
        "metric": found.metric,
        "goal": found.goal,
        "best": found.best,
        "is_over": found.is_over,
        "has_jobs": has_jobs,
        "left_out": len(found.trials) - len(shown),
        "axes": [axis.described for axis in axes],
        "trials": [_trial(trial, axes) for trial in shown],
    }


def _shown(found: SweepReport) -> list[Trial]:
    newest = list(found.trials[-MOST_TRIALS:])
    best = found.best_trial
    return newest if best is None or best in newest else [best, *newest]


def _trial(trial: Trial, axes: Sequence[_Axis]) -> list[Any]:
    values = trial.values
    places = [axis.place(values.get(axis.name)) for axis in axes]
    return [trial.number, trial.job, trial.state, _finite(trial.best), places]


class _Axis:
    """As it was declared; of what was not declared (or does not fit it), as its values look."""

    def __init__(self, scale: Scale | None, name: str, values: Sequence[Any]) -> None:
        self.name = name
        known = [value for value in values if value is not None]
        if scale is None or (scale.kind != "choice" and not all(map(is_number, known))):
            scale = _guessed(name, known)
        self._scale = scale
        unknown = [dumps(value) for value in known] if scale.kind == "choice" else []
        self._choices = tuple(dict.fromkeys([*scale.values, *unknown]))
        self._numbers = [float(value) for value in known if is_number(value) and math.isfinite(value)]

    @property
    def described(self) -> dict[str, Any]:
        if self._scale.kind == "choice":
            return {"name": self.name, "kind": "choice", "values": [_label(one) for one in self._choices]}
        ends = [end for end in (self._scale.low, self._scale.high) if end is not None]  # rounding may exceed them
        everything = [*self._numbers, *ends] or [0.0, 1.0]
        low, high = min(everything), max(everything)
        return {"name": self.name, "kind": self._scale.kind, "log": self._scale.is_log, "low": low, "high": high}

    def place(self, value: Any) -> float | int | None:
        """The number of a choice, or the value itself."""
        if value is None:
            return None
        if self._scale.kind == "choice":
            return self._choices.index(dumps(value))
        return _finite(value)


def _guessed(name: str, values: Sequence[Any]) -> Scale:
    if not values or not all(map(is_number, values)):
        return Scale(name, "choice")
    low, high = min(values), max(values)
    kind = "int" if all(isinstance(value, int) for value in values) else "float"
    return Scale(name, kind, is_log=0 < _MUCH * low <= high)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _label(text: str) -> str:
    value = json.loads(text)
    return value if isinstance(value, str) else text


# --- page -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Explained:
    """The importances of a sweep's parameters, or why there are none."""

    importances: Sequence[Importance] = ()
    problem: str = ""


def page(found: SweepReport, explained: Explained, assets: Assets) -> str:
    facts = "".join(f"<p>{escape(line)}</p>" for line in _facts(found))
    main = (
        f'{facts}<div class="stack"><noscript><p>The charts need JavaScript; the table below does not.</p></noscript>'
        f'<div class="stack sweep-charts" id="sweep-charts"></div>{_trials(found)}</div>'
    )
    shown = document(found, has_jobs=False)
    shown |= {"importance": [asdict(one) for one in explained.importances], "importance_problem": explained.problem}
    return whole(f"Sweep {found.name}", main, ("sweep-document", shown), assets)


def _facts(found: SweepReport) -> Iterator[str]:
    yield f"{found.method}, {len(found.trials)} trials, {found.state}{f': {found.reason}' if found.reason else ''}"
    if (best := found.best_trial) is not None:
        values = ", ".join(f"{name} = {shown_value(best.values.get(name))}" for name in found.parameters)
        yield f"Best: trial {best.number} (job {best.job}), {found.metric} {shown_value(best.best)}, with {values}"


def _trials(found: SweepReport) -> str:
    return (
        '<section class="panel" aria-labelledby="trials-title"><header><h2 id="trials-title">Trials</h2>'
        '<span class="muted small" id="selected-trials" role="status"></span>'
        f'<span class="push">{csv_button(found.name, rows(found))}</span></header>'
        f"{table('Table of trials', rows(found), 'data-trial')}</section>"
    )


def rows(found: SweepReport) -> Iterator[list[str]]:
    metric = [f"{found.metric} best", f"{found.metric} last", "step"] if found.metric else []
    yield ["trial", "job", "state", *found.parameters, *metric, "seconds", "reason"]
    for trial in found.trials:
        measured = [shown_value(trial.best), shown_value(trial.last), shown_value(trial.step)] if found.metric else []
        values = [shown_value(trial.values.get(name)) for name in found.parameters]
        about = [str(trial.number), shown_value(trial.job), str(trial.state)]
        yield [*about, *values, *measured, shown_value(trial.took_s), _reason(trial)]


def _reason(trial: Trial) -> str:
    return trial.reason if trial.state is not TrialState.RUNNING else ""


def shown_value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
