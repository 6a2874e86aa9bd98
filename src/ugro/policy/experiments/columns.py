"""The columns of the experiments table: a fact, a parameter, or the value of a metric. Pure.

A column is written ``name``, ``param:lr`` or ``best:val/loss``, in addresses too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ugro.core.errors import UsageError
from ugro.core.experiment import Experiment, Figure
from ugro.core.metrics import is_held_out, is_loss
from ugro.policy.experiments.parameters import is_seed, number

Value = float | str | None
PARAMETER = "param"
METRICS = ("last", "best", "min", "max")
_DEFAULT_PARAMETERS = 4
_MAX_LISTED = 200
_LARGER = re.compile(
    r"acc|auc|f1|bleu|rouge|score|reward|return|precision|recall|iou|map$|throughput|per_s(ec(ond)?)?$|use$|util",
    re.IGNORECASE,
)

_FACTS: dict[str, Callable[[Experiment, float], Value]] = {
    "id": lambda one, now: one.id,
    "name": lambda one, now: one.name,
    "state": lambda one, now: one.state.value,
    "user": lambda one, now: one.user,
    "submitted": lambda one, now: one.submitted_s,
    "duration": lambda one, now: None if one.started_s is None else (one.ended_s or now) - one.started_s,
    "steps": lambda one, now: max((figure.last_step for figure in one.figures.values()), default=None),
    "energy": lambda one, now: one.energy_wh,
    "cost": lambda one, now: one.cost,
    "tags": lambda one, now: " ".join(one.tags) or None,
    "note": lambda one, now: one.note or None,
}
FACTS = tuple(_FACTS)


@dataclass(frozen=True, slots=True)
class Column:
    kind: str  # a fact, ``param``, or one of METRICS
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> Column:
        kind, _, key = text.partition(":")
        if kind in _FACTS and not key:
            return cls(kind)
        if kind in (PARAMETER, *METRICS) and key:
            return cls(kind, key)
        known = f"{', '.join(FACTS)}, param:NAME, best:METRIC, last:METRIC"
        raise UsageError(f"unknown column {text!r:.80}", hint=f"columns: {known}")

    def __str__(self) -> str:
        return f"{self.kind}:{self.key}" if self.key else self.kind

    @property
    def label(self) -> str:
        if self.kind == PARAMETER:
            return self.key
        return f"{self.key} {self.kind}" if self.key else self.kind

    def value(self, one: Experiment, now: float) -> Value:
        if self.kind in _FACTS:
            return _FACTS[self.kind](one, now)
        if self.kind == PARAMETER:
            text = one.parameters.get(self.key)
            found = None if text is None else number(text)
            return text if found is None else found
        figure = one.figures.get(self.key)
        return None if figure is None else _measured(self, figure)


def is_larger_better(key: str) -> bool:
    return _LARGER.search(key) is not None and not is_loss(key)


def best_of(key: str, figure: Figure) -> float | None:
    """What ``best`` means everywhere: the smallest value, or the largest of a metric that should be large."""
    return figure.most if is_larger_better(key) else figure.least


def known_columns(experiments: Iterable[Experiment]) -> list[Column]:
    """All columns: facts, then parameters and metrics, the most frequent first."""
    parameters: Counter[str] = Counter()
    metrics: Counter[str] = Counter()
    for one in experiments:
        parameters.update(one.parameters.keys())
        metrics.update(one.figures.keys())
    names = [name for name, _ in parameters.most_common(_MAX_LISTED)]
    keys = [key for key, _ in metrics.most_common(_MAX_LISTED)]
    measured = [Column(kind, key) for key in sorted(keys, key=metric_order) for kind in METRICS]
    return [*map(Column, FACTS), *(Column(PARAMETER, name) for name in names), *measured]


def columns_at_first(experiments: Sequence[Experiment]) -> list[Column]:
    """The default columns: state and times, the parameters that differ, and the most important metric."""
    values: dict[str, set[str]] = {}
    metrics: Counter[str] = Counter()
    for one in experiments:
        metrics.update(one.figures.keys())
        for name, text in one.parameters.items():
            values.setdefault(name, set()).add(text)
    differing = [name for name, found in values.items() if len(found) > 1]
    # A seed is the least interesting parameter; it comes last.
    differing.sort(key=lambda name: (is_seed(name), name.startswith("env."), len(values[name])))
    keys = sorted(metrics, key=lambda key: (-metrics[key] // max(1, len(experiments) // 4), *metric_order(key)))[:1]
    measured = [Column(kind, key) for key in keys for kind in ("best", "last")]
    chosen = [Column(PARAMETER, name) for name in differing[:_DEFAULT_PARAMETERS]]
    energy = [Column("energy")] if any(one.energy_wh is not None for one in experiments) else []
    cost = [Column("cost")] if any(one.cost is not None for one in experiments) else []
    facts = [Column("duration"), *energy, *cost, Column("submitted"), Column("tags")]
    return [Column("state"), *chosen, *measured, *facts]


def metric_order(key: str) -> tuple[bool, bool, str]:
    return (not is_loss(key), not is_held_out(key), key)


def _measured(column: Column, figure: Figure) -> float | None:
    if column.kind == "best":
        return best_of(column.key, figure)
    return {"last": figure.last, "min": figure.least, "max": figure.most}[column.kind]
