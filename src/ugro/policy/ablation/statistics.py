"""Means over seeds with 95 % intervals, ratios to equal shares, and curves with bands. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from ugro.policy.ablation.grid import baseline
from ugro.policy.ablation.measure import METRICS, Figures, Moment

# Student's t for a two-sided 95 % interval, by degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T_OF_MANY = 1.96
BINS = 60


@dataclass(frozen=True, slots=True)
class Estimate:
    mean: float
    half: float | None  # of the 95 % interval; None: one value says nothing about the others
    count: int

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """One job of an experiment."""

    number: int  # of its trial
    model: str
    variant: str
    seed: int
    state: str
    job: int | None = None
    reason: str = ""
    figures: Figures = field(default_factory=Figures)
    curve: tuple[Moment, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A variant of a model, over its seeds."""

    model: str
    variant: str
    runs: int  # that are complete
    wanted: int
    values: Mapping[str, Estimate]  # by metric; one that was not measured is not there
    ratio: Estimate | None  # samples per second, relative to ``against``, seed by seed
    against: str | None
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over bins."""

    variant: str
    xs: tuple[float, ...]
    means: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]


def estimate(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    if len(values) == 1:
        return Estimate(values[0], None, 1)
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else _T_OF_MANY
    return Estimate(fmean(values), t * stdev(values) / math.sqrt(len(values)), len(values))


def rows(runs: Sequence[Run]) -> list[Row]:
    """In the order in which models and variants first occur."""
    places = dict.fromkeys((run.model, run.variant) for run in sorted(runs, key=lambda one: one.number))
    return [_row(runs, *place) for place in places]


def _row(runs: Sequence[Run], model: str, variant: str) -> Row:
    of_model = [run for run in runs if run.model == model]
    own = [run for run in of_model if run.variant == variant]
    done = [run for run in own if is_measured(run)]
    found = {metric.key: estimate(_values(done, metric.key)) for metric in METRICS}
    against = baseline(variant, dict.fromkeys(run.variant for run in of_model))
    against = None if against == variant else against
    ratio = _ratio(done, [run for run in of_model if run.variant == against]) if against else None
    return Row(
        model, variant, len(done), len(own), {key: one for key, one in found.items() if one is not None}, ratio,
        against, done[-1].figures.shares if done else (),
    )  # fmt: skip


def is_measured(run: Run) -> bool:
    return run.state == "complete" and run.figures.samples_per_s is not None


def _values(runs: Sequence[Run], key: str) -> list[float]:
    found = (getattr(run.figures, key) for run in runs)
    return [value for value in found if value is not None]


def _ratio(runs: Sequence[Run], others: Sequence[Run]) -> Estimate | None:
    """Pairs with the same seed ran soon after each other: what disturbs the machine disturbs both."""
    known = {run.seed: run.figures.samples_per_s for run in others if is_measured(run)}
    pairs = [(run.figures.samples_per_s, known.get(run.seed)) for run in runs]
    return estimate([own / other for own, other in pairs if own and other])


def bands(runs: Sequence[Run], model: str, x_of: Callable[[Moment], float]) -> list[Band]:
    """The loss over samples or over time: a mean for each bin and seed, and an interval over the seeds.

    A curve ends where the first of its seeds ends.
    """
    found = []
    for variant in dict.fromkeys(run.variant for run in runs if run.model == model):
        own = [run.curve for run in runs if _is_of(run, model, variant) and run.curve]
        if own:
            found.append(_band(variant, own, x_of))
    return found


def _is_of(run: Run, model: str, variant: str) -> bool:
    return (run.model, run.variant) == (model, variant) and is_measured(run)


def _band(variant: str, curves: Sequence[Sequence[Moment]], x_of: Callable[[Moment], float]) -> Band:
    end = min(x_of(curve[-1]) for curve in curves)
    count = max(1, min(BINS, *(len(curve) for curve in curves)))
    edges = [end * number / count for number in range(1, count + 1)]
    binned = [_binned(curve, edges, x_of) for curve in curves]
    xs, means, lows, highs = [], [], [], []
    for number, edge in enumerate(edges):
        one = estimate([values[number] for values in binned if number in values])
        if one is not None:
            xs.append(edge)
            means.append(one.mean)
            lows.append(one.low)
            highs.append(one.high)
    return Band(variant, tuple(xs), tuple(means), tuple(lows), tuple(highs))


def _binned(curve: Sequence[Moment], edges: Sequence[float], x_of: Callable[[Moment], float]) -> dict[int, float]:
    inside: dict[int, list[float]] = {}
    for moment in curve:
        # A step ends in the bin whose end it does not pass; rounding must not move the last one out.
        place = bisect_right(edges, x_of(moment) - 1e-9 * edges[-1])
        if place < len(edges):
            inside.setdefault(place, []).append(moment.loss)
    return {place: fmean(losses) for place, losses in inside.items()}
