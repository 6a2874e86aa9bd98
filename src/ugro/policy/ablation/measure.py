"""What a run has measured, from the records of its own steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from ugro.core.energy import JobEnergy
from ugro.core.training import AttemptSteps, StepRecord

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
