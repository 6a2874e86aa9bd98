"""What a run has measured, from the records of its own steps. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev, stdev

from ugro.features.experiments.rules.grid import baseline
from ugro.features.training.model import JobEnergy
from ugro.kernel.telemetry.records import AttemptSteps, StepRecord

SETTLING = 8  # steps at the beginning, in which shares are found, are not counted
_LEAST_PART = 4  # of a short run, a quarter of the steps
_NO_METER = "no device of these runs could be read"
_LAST = 8  # steps whose losses are averaged for the loss at the end


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    title: str
    unit: str
    meaning: str
    more_is_better: bool = False
    scale: float = 1.0  # times this, it is in its unit
    lack: str = "the runs have recorded none"  # why it may be missing


METRICS = (
    Metric("samples_per_s", "Samples per second", "samples/s", "after settling", more_is_better=True),
    Metric("epoch_s", "Time per epoch", "s", "wall clock, with checkpoints"),
    Metric("load_variance", "Load variance", "%", "standard deviation over mean of the ranks' own times", scale=100),
    Metric("imbalance", "Imbalance", "×", "the slowest rank's own time over the mean"),
    Metric("waiting", "Waiting", "%", "share of the ranks' time that they wait for others", scale=100),
    Metric("epoch_j", "Energy per epoch", "J", "of all devices that can be read, also while idle", lack=_NO_METER),
    Metric("epoch_cost", "Cost per epoch", "", "energy at the configured price", lack=f"{_NO_METER}, or no price"),
    Metric("loss", "Loss at the end", "", f"training loss, mean of the last {_LAST} steps"),
)


@dataclass(frozen=True, slots=True)
class Moment:
    """After a step."""

    samples: int
    seconds: float  # since the first step began
    loss: float


@dataclass(frozen=True, slots=True)
class Figures:
    """``None``: not measured."""

    samples_per_s: float | None = None
    epoch_s: float | None = None
    load_variance: float | None = None
    imbalance: float | None = None
    waiting: float | None = None
    epoch_j: float | None = None
    epoch_cost: float | None = None
    loss: float | None = None
    steps: int = 0
    shares: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    device: str = ""
    parameters: int = 0
    currency: str = ""


def joined(attempts: Sequence[AttemptSteps]) -> list[StepRecord]:
    """As if it had never been interrupted: an attempt that goes back to a checkpoint replaces what it repeats."""
    found: list[StepRecord] = []
    for attempt in sorted(attempts, key=lambda one: one.attempt):
        begin = attempt.steps[0].step
        found = [*(step for step in found if step.step < begin), *attempt.steps]
    return found


def figures(attempts: Sequence[AttemptSteps], energy: JobEnergy | None) -> Figures:
    """Of steps with as many ranks as the last one has.

    With local updates there is a record for each round, of one step on average: it counts for all of its steps.
    """
    steps = joined(attempts)
    if not steps:
        return Figures()
    ranks, last = len(steps[-1].shares), steps[-1].step
    count = last - _begin(steps) + 1
    first = _begin(steps) + min(SETTLING, count // _LEAST_PART)
    settled = [(step, of) for step, of in _counted(steps) if step.step >= first and len(step.shares) == ranks]
    time_s = math.fsum(step.step_s * of for step, of in settled)
    newest = max(attempts, key=lambda one: one.attempt)
    losses = [step.loss for step in steps if step.step > last - _LAST and step.loss is not None]
    epoch_j, epoch_cost = _energy(energy)
    own = [step.own_s for step, _ in settled]
    waiting_s = math.fsum(sum(step.waiting_s) * of for step, of in settled)
    return Figures(
        sum(step.samples * of for step, of in settled) / time_s if time_s else None,
        _epoch_s(steps),
        _mean([_variation(times) for times in own]),
        _mean([max(times) / fmean(times) for times in own if fmean(times)]),
        min(1.0, waiting_s / (time_s * ranks)) if time_s else None,
        epoch_j,
        epoch_cost,
        _mean([loss for loss in losses if math.isfinite(loss)]),
        count,
        steps[-1].shares,
        newest.nodes,
        newest.device,
        newest.parameters,
        (energy.currency or "") if energy else "",
    )


def moments(attempts: Sequence[AttemptSteps]) -> list[Moment]:
    """The loss after each step. A time in which no attempt ran counts: it was spent."""
    found: list[Moment] = []
    samples, begin_s = 0, 0.0
    for step, count in _counted(joined(attempts)):
        begin_s = begin_s or step.time_s - step.step_s * count
        samples += step.samples * count
        if step.loss is not None and math.isfinite(step.loss) and step.time_s:
            found.append(Moment(samples, max(0.0, step.time_s - begin_s), step.loss))
    return found


def _counted(steps: Sequence[StepRecord]) -> Iterator[tuple[StepRecord, int]]:
    """With the number of steps that each record is about."""
    before = _begin(steps) - 1
    for step in steps:
        yield step, max(1, step.step - before)
        before = step.step


def _begin(steps: Sequence[StepRecord]) -> int:
    """The first step: a first round ends a few steps later, and of very many steps only the last ones are known."""
    return 0 if not steps or steps[0].step < SETTLING else steps[0].step


def _epoch_s(steps: Sequence[StepRecord]) -> float | None:
    """Means over whole epochs, from the last step of the one before; the first epoch only if there is no other."""
    ends: dict[int, float] = {}
    for step in steps:
        ends[step.epoch] = step.time_s
    if not all(ends.values()):
        return None
    epochs = sorted(ends)
    lengths = [ends[epoch] - ends[epoch - 1] for epoch in epochs if epoch - 1 in ends]
    first_s = ends[epochs[0]] - (steps[0].time_s - steps[0].step_s)
    found = [length for length in lengths if length > 0] or ([first_s] if first_s > 0 else [])
    return _mean(found)


def _energy(energy: JobEnergy | None) -> tuple[float | None, float | None]:
    if energy is None or not energy.epochs or not energy.joules:
        return None, None
    joules = fmean(one.joules for one in energy.epochs)
    return joules, None if energy.cost is None else energy.cost * joules / energy.joules


def _variation(own_s: Sequence[float]) -> float:
    mean = fmean(own_s)
    return pstdev(own_s) / mean if mean else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


# --- statistics -------------------------------------------------------------------------------------------------------
# Means over seeds with 95 % intervals, ratios to equal shares, and curves with bands. Pure.


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
