"""Summarises the metrics that a training wrote, step by step. Pure: lines in, numbers out.

A line is ``{"step": 10, "values": {"loss": 0.5}}``; the values may also be next to the step. ``ugro.train`` writes more
kinds of records: its values about all ranks take precedence over what a script logged on one. Other lines are skipped,
because the file is written while it is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ugro.core.training import StepRecord, document, loss_of, step_record

_LOSSES = ("loss", "train/loss", "train_loss")
# The kinds of records that ``ugro.train`` writes for itself: their values are named ``profile/step_s``.
INTERNAL = ("profile/", "plan/", "advice/", "progress/")
_LOSS_WORD = re.compile(r"loss(es)?([/_.\s-]|$)", re.IGNORECASE)
_TRAIN_WORD = re.compile(r"(^|[/_.\s-])train", re.IGNORECASE)
_HELD_OUT = re.compile(r"(^|[/_.\s-])(val|valid|validation|eval|evaluation|test|dev)([/_.\s-]|$)", re.IGNORECASE)
_THROUGHPUTS = ("throughput", "samples_per_s", "samples_per_second", "tokens_per_s", "tokens_per_second")
_GPU_USES = ("gpu_use", "gpu_util", "gpu_utilization")  # in percent
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


@dataclass(frozen=True, slots=True)
class MetricsSummary:
    records: int
    last_step: int | None = None
    final_loss: float | None = None
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


def summarise(lines: Iterable[bytes]) -> MetricsSummary | None:
    """None if there are no records."""
    logged, steps = _Logged(), _Steps()
    records = 0
    last_step: int | None = None
    checkpoint: tuple[str, int | None] | None = None
    for line in lines:
        if (record := document(line)) is None:
            continue
        records += 1
        step = _step(record)
        last_step = step if step is not None else last_step
        kind = record.get("kind", "log")
        if kind == "log":
            logged.add(step, record)
        elif kind == "profile":
            steps.add(record)
        elif kind == "checkpoint":
            checkpoint = (str(record.get("path", ""))[:_MAX_PATH], step)
    if not records:
        return None
    return _together(records, last_step, checkpoint, logged, steps)


def _together(
    records: int, last_step: int | None, checkpoint: tuple[str, int | None] | None, logged: _Logged, steps: _Steps
) -> MetricsSummary:
    # A script that never calls step.loss has none in its steps.
    loss = steps.loss if steps.loss.final is not None else logged.loss
    speed, speed_name = logged.mean(_THROUGHPUTS)
    if steps.seconds > 0:
        speed, speed_name = steps.samples / steps.seconds, _OF_ALL_RANKS
    use, use_name = logged.mean(_GPU_USES)
    use = None if use is None else use / 100
    if use is None and steps.devices_s > 0:
        use, use_name = min(1.0, steps.computing_s / steps.devices_s), "time computing"
    return MetricsSummary(
        records,
        last_step,
        loss.final,
        loss.best,
        loss.best_step,
        loss.lost_at_step,
        speed,
        speed_name,
        use,
        use_name,
        steps.slowest_s / steps.mean_s if steps.mean_s > 0 else None,
        *(checkpoint or (None, None)),
    )


@dataclass(slots=True)
class _Loss:
    final: float | None = None
    best: float | None = None
    best_step: int | None = None
    lost_at_step: int | None = None

    def add(self, step: int | None, loss: float | None) -> None:
        if loss is None:
            return
        if not math.isfinite(loss):
            self.lost_at_step = step if self.lost_at_step is None else self.lost_at_step
            return
        self.final, self.lost_at_step = loss, None
        if self.best is None or loss < self.best:
            self.best, self.best_step = loss, step


@dataclass(slots=True)
class _Logged:
    """What a script logged on one rank."""

    loss: _Loss = field(default_factory=_Loss)
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, step: int | None, record: dict[str, Any]) -> None:
        inner = record.get("values")
        values = inner if isinstance(inner, dict) else record
        self.loss.add(step, next((loss_of(values[name]) for name in _LOSSES if name in values), None))
        for name in (*_THROUGHPUTS, *_GPU_USES):
            if name in values and (number := loss_of(values[name])) is not None and math.isfinite(number):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + number, count + 1)

    def mean(self, names: Iterable[str]) -> tuple[float | None, str | None]:
        found = next((name for name in names if name in self._sums), None)
        if found is None:
            return None, None
        total, count = self._sums[found]
        return total / count, found


@dataclass(slots=True)
class _Steps:
    """What ``ugro.train`` recorded about all ranks."""

    loss: _Loss = field(default_factory=_Loss)
    samples: int = 0
    seconds: float = 0.0
    devices_s: float = 0.0
    computing_s: float = 0.0
    slowest_s: float = 0.0
    mean_s: float = 0.0

    def add(self, record: dict[str, Any]) -> None:
        if (step := step_record(record)) is None:
            return
        self.loss.add(step.step, step.loss)
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
