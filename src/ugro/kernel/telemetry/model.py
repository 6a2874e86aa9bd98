"""The names of metrics, and the summary of a training. Pure: values in, numbers out.

The loss of a job is that of its metrics' figures, wherever it is shown. ``ugro.train`` records more about its steps:
what all ranks together did comes from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ugro.kernel.jobs.model import JobState
from ugro.kernel.telemetry.records import StepRecord, document, step_record

# --- a job as an experiment -------------------------------------------------------------------------------------------
# It has parameters, metrics, and people's notes.

MOST_BINS = 2000  # of a curve in an answer


@dataclass(frozen=True, slots=True)
class KeySummary:
    owner: str
    attempt: int
    rank: int
    key: str
    count: int
    first_step: int
    last_step: int
    last_time: float
    last_value: float | None  # the last finite one; None: there is none


@dataclass(frozen=True, slots=True)
class Figure:
    """The values of one metric, of the newest attempt and the first rank that have it.

    ``None`` if it never was a finite number. docs/results.md defines these for users.
    """

    last: float | None  # the last finite value
    least: float | None
    most: float | None
    last_step: int  # of the last value, finite or not
    count: int
    least_step: int | None = None
    most_step: int | None = None
    odd_step: int | None = None  # from this step on the values are NaN or infinite


@dataclass(frozen=True, slots=True)
class Experiment:
    id: int
    name: str
    user: str
    state: JobState
    submitted_s: float  # unix seconds, like all of these
    started_s: float | None = None
    ended_s: float | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    note: str = ""
    tags: tuple[str, ...] = ()
    energy_wh: float | None = None  # None: not measured
    cost: float | None = None  # at the present price; None: there is none


# --- files in which trainings write metrics ---------------------------------------------------------------------------
# They are small and become the curves of a job; the collection of outputs takes them wherever a job writes them. Pure:
# names in, decisions out.


_NAME = re.compile(
    r"metrics[\w.-]*\.jsonl"  # ugro.train, or a script itself
    r"|events\.out\.tfevents\..+"  # TensorBoard
    r"|run-[^/]+\.wandb"  # Weights & Biases
)


def is_metric_file(name: str) -> bool:
    """``name`` is a path with slashes, below the folder that a job writes to."""
    return _NAME.fullmatch(PurePosixPath(name).name) is not None


# --- names of metrics -------------------------------------------------------------------------------------------------


_LOSSES = ("loss", "train/loss", "train_loss")
# The kinds of records that ``ugro.train`` writes for itself: their values are named ``profile/step_s``.
INTERNAL = ("profile/", "plan/", "advice/", "progress/")
TOTAL_STEPS = "progress/total_steps"  # how many steps a training will have
_LOSS_WORD = re.compile(r"loss(es)?([/_.\s-]|$)", re.IGNORECASE)
_TRAIN_WORD = re.compile(r"(^|[/_.\s-])train", re.IGNORECASE)
_HELD_OUT = re.compile(r"(^|[/_.\s-])(val|valid|validation|eval|evaluation|test|dev)([/_.\s-]|$)", re.IGNORECASE)
_THROUGHPUTS = (
    "throughput", "samples_per_s", "samples_per_sec", "samples_per_second", "tokens_per_s", "tokens_per_sec",
    "tokens_per_second", "train_samples_per_second", "train_tokens_per_second",
)  # fmt: skip
_DEVICE_USES = ("gpu_use", "gpu_util", "gpu_utilization")  # in percent
_OF_ALL_RANKS = "samples_per_s"
_MAX_PATH = 4096


def is_internal(name: str) -> bool:
    """Whether ``ugro.train`` writes this metric for ``ugro profile``; it is not listed among a training's metrics."""
    return name.startswith(INTERNAL)


def main_loss(names: Iterable[str]) -> str | None:
    """The loss to show if only one is shown: of the training, and one of held-out data only if there is no other."""
    return min((name for name in names if is_loss(name)), key=_loss_order, default=None)


def is_loss(name: str) -> bool:
    return _LOSS_WORD.search(name) is not None and not is_internal(name)


def is_held_out(name: str) -> bool:
    return _HELD_OUT.search(name) is not None


def _loss_order(name: str) -> tuple[object, ...]:
    lower = name.lower()
    known = _LOSSES.index(lower) if lower in _LOSSES else len(_LOSSES)
    # Parts of a loss have longer names: train/loss comes before train/loss_of_boxes.
    return known, is_held_out(name), _TRAIN_WORD.search(name) is None, len(name), name


def is_averaged(name: str) -> bool:
    """Whether a summary shows the mean of this metric."""
    return _base(name) in (*_THROUGHPUTS, *_DEVICE_USES) and not is_internal(name)


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of the metrics of a job, up to one of its attempts."""

    figures: Mapping[str, Figure] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)  # of those that are averaged
    parameters: Mapping[str, str] = field(default_factory=dict)  # that the training wrote beside its metrics


@dataclass(frozen=True, slots=True)
class MetricsSummary:
    last_step: int | None = None
    loss_name: str | None = None
    final_loss: float | None = None  # the last finite value
    best_loss: float | None = None
    best_step: int | None = None
    lost_at_step: int | None = None  # from this step on the loss is not a finite number
    throughput: float | None = None  # the mean of what was recorded; with ``ugro.train``, samples over time
    throughput_name: str | None = None
    device_use: float | None = None  # a share
    device_use_name: str | None = None
    imbalance: float | None = None
    checkpoint: str | None = None  # the last one written
    checkpoint_step: int | None = None


def summary(measured: Measured, steps: StepTotals | None) -> MetricsSummary | None:
    """None if nothing was measured."""
    figures, of_steps = measured.figures, steps or StepTotals()
    last_steps = [figure.last_step for figure in figures.values()]
    last_steps += [] if of_steps.last_step is None else [of_steps.last_step]
    if not last_steps and of_steps.checkpoint is None:
        return None
    name = main_loss(figures)
    loss = figures[name] if name is not None else _NO_FIGURE
    return MetricsSummary(
        max(last_steps, default=None),
        name,
        loss.last,
        loss.least,
        loss.least_step,
        loss.odd_step,
        *_throughput(measured, of_steps),
        *_device_use(measured, of_steps),
        of_steps.slowest_s / of_steps.mean_s if of_steps.mean_s > 0 else None,
        of_steps.checkpoint,
        of_steps.checkpoint_step,
    )


_NO_FIGURE = Figure(None, None, None, 0, 0)
_Named = tuple[float | None, str | None]


def _throughput(measured: Measured, steps: StepTotals) -> _Named:
    """Of all ranks, if that was measured; otherwise what the script says."""
    if steps.seconds > 0:
        return steps.samples / steps.seconds, _OF_ALL_RANKS
    return _mean(measured, _THROUGHPUTS)


def _device_use(measured: Measured, steps: StepTotals) -> _Named:
    use, name = _mean(measured, _DEVICE_USES)
    if use is not None:
        return use / 100, name
    if steps.devices_s > 0:
        return min(1.0, steps.computing_s / steps.devices_s), "time computing"
    return None, None


def _mean(measured: Measured, bases: Sequence[str]) -> _Named:
    found = [name for name in measured.means if _base(name) in bases]
    name = min(found, key=lambda name: (bases.index(_base(name)), len(name), name), default=None)
    return (None, None) if name is None else (measured.means[name], name)


def _base(name: str) -> str:
    """The last part of a name, in small letters."""
    return re.split(r"[/.]", name)[-1].lower()


# --- what ugro.train measured -----------------------------------------------------------------------------------------


def read_totals(lines: Iterable[bytes]) -> StepTotals | None:
    """Of the lines of a metrics.jsonl; None if it has no steps and no checkpoints. Others are skipped."""
    totals = StepTotals()
    for line in lines:
        if (record := document(line)) is not None:
            totals.add(record)
    return totals if totals.last_step is not None or totals.checkpoint is not None else None


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps of all ranks."""

    last_step: int | None = None
    samples: int = 0
    seconds: float = 0.0
    devices_s: float = 0.0
    computing_s: float = 0.0
    slowest_s: float = 0.0
    mean_s: float = 0.0
    checkpoint: str | None = None  # the last one written
    checkpoint_step: int | None = None

    def add(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "checkpoint":
            self.checkpoint, self.checkpoint_step = str(record.get("path", ""))[:_MAX_PATH], _step(record)
        if kind != "profile" or (step := step_record(record)) is None:
            return
        self.last_step = step.step
        self.samples += step.samples
        self.seconds += step.step_s
        self.devices_s += step.step_s * len(step.shares)
        self.computing_s += _computing_s(step)
        self.slowest_s += max(step.own_s)
        self.mean_s += sum(step.own_s) / len(step.own_s)


def _computing_s(step: StepRecord) -> float:
    """Without waiting for data, other ranks or the network."""
    return sum(max(0.0, own - data) for own, data in zip(step.own_s, step.data_s, strict=True))


def _step(record: dict[str, Any]) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 1 << 63 else None
