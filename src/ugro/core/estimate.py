"""What a map would take: a sample of its items, places where it could run, and what is predicted of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev


class Bound(StrEnum):
    WORK = "work"
    DRIVER = "driver"
    DATA = "data"
    LONGEST = "longest"


@dataclass(frozen=True, slots=True)
class Sample:
    items: int  # of the whole input
    costs_s: tuple[float, ...]  # of some, on one core of this machine
    item_bytes: float
    result_bytes: float

    @property
    def work_s(self) -> float:
        return self.items * fmean(self.costs_s)

    @property
    def error(self) -> float:
        """Of the mean, relative: 0.1 is ± 10 %, two times of three."""
        mean_s = fmean(self.costs_s)
        if len(self.costs_s) < 2 or len(self.costs_s) >= self.items or mean_s <= 0:
            return 0.0
        return stdev(self.costs_s) / math.sqrt(len(self.costs_s)) / mean_s

    @property
    def data_bytes(self) -> float:
        return self.items * (self.item_bytes + self.result_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the work could be done, from the simplest to the largest."""

    name: str  # "one core", "this machine", "3 nodes"
    slots: int
    speed: float = 1.0  # of one slot while all are busy, against the core of the sample
    start_s: float = 0.0  # until the first item can begin
    slot_item_s: float = 0.0  # a slot's time for an item, beside the function
    driver_item_s: float = 0.0
    bytes_per_s: float | None = None  # to and from it; None: no bound
    is_here: bool = False  # its slots and the driver share the same cores: copying data is work, too
    is_assumed: bool = False  # not all of its figures were measured


@dataclass(frozen=True, slots=True)
class Prediction:
    place: Place
    seconds: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class Estimate:
    sample: Sample
    predictions: tuple[Prediction, ...]  # in the order of the places
    best: int  # which of them is recommended
    reason: str

    @property
    def recommended(self) -> Prediction:
        return self.predictions[self.best]
