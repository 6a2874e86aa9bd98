"""What the charts of a sweep show, for ``web/static/sweep/``: axes, and each trial with its place on them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ugro.core.sweep import Scale, SweepReport, Trial
from ugro.policy.sweep.scales import is_number
from ugro.policy.sweep.space import dumps

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
