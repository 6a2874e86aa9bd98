"""What a training wrote down of itself, step by step, in a few numbers. Pure: lines in, numbers out.

A line is ``{"step": 10, "values": {"loss": 0.5}}``; the values may also stand beside the step. What is no such line
is passed over: the file is written while it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

_LOSSES = ("loss", "train_loss", "train/loss")
_THROUGHPUTS = ("throughput", "samples_per_s", "samples_per_second", "tokens_per_s", "tokens_per_second")
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class MetricsSummary:
    records: int
    last_step: int | None = None
    final_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    throughput: float | None = None  # the mean of what was recorded
    throughput_name: str | None = None


def summarise(lines: Iterable[bytes]) -> MetricsSummary | None:
    """None when there is no record in it."""
    records = 0
    last_step = best_step = None
    final_loss = best_loss = None
    speeds: dict[str, tuple[float, int]] = {}
    for line in lines:
        if (record := _record(line)) is None:
            continue
        step, values = record
        records += 1
        last_step = step if step is not None else last_step
        loss = next((values[name] for name in _LOSSES if name in values), None)
        if loss is not None:
            final_loss = loss
            if best_loss is None or loss < best_loss:
                best_loss, best_step = loss, step
        for name in _THROUGHPUTS:
            if name in values:
                total, count = speeds.get(name, (0.0, 0))
                speeds[name] = (total + values[name], count + 1)
    if not records:
        return None
    told = next((name for name in _THROUGHPUTS if name in speeds), None)
    speed = speeds[told][0] / speeds[told][1] if told else None
    return MetricsSummary(records, last_step, final_loss, best_loss, best_step, speed, told)


def _record(line: bytes) -> tuple[int | None, dict[str, float]] | None:
    if len(line) > _LONGEST_LINE:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    inner = found.get("values")
    values = inner if isinstance(inner, dict) else found
    numbers = {str(name): float(value) for name, value in values.items() if _is_number(value)}
    step = found.get("step")
    return (step if _is_number(step) and isinstance(step, int) else None), numbers


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 63
