"""Prometheus' text format, written by hand: it is a dozen lines, and every family is built at each scrape.

That is also why a job's series end with the job: nobody has to remember to forget them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 7 * 86400.0)
SHORT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
Labels = Mapping[str, object]


@dataclass(slots=True)
class Family:
    name: str
    kind: str  # gauge, counter or histogram
    help: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: object) -> None:
        """Unknown values are left out."""
        if value is not None:
            self.samples.append(("", labels, float(value)))

    def add_histogram(self, histogram: Histogram, **labels: object) -> None:
        total = 0
        for limit, count in zip((*histogram.limits, math.inf), histogram.counts, strict=True):
            total += count
            self.samples.append(("_bucket", {**labels, "le": _number(limit)}, float(total)))
        self.samples.append(("_sum", labels, histogram.sum))
        self.samples.append(("_count", labels, float(total)))


class Histogram:
    def __init__(self, limits: Sequence[float]) -> None:
        self.limits = tuple(limits)
        self.counts = [0] * (len(self.limits) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        place = next((at for at, limit in enumerate(self.limits) if value <= limit), len(self.limits))
        self.counts[place] += 1
        self.sum += value


def exposition(families: Iterable[Family]) -> str:
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [f"{family.name}{more}{_labels(labels)} {_number(value)}" for more, labels, value in family.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
