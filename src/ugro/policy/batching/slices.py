"""How many items the next batch of a slot has.

Slots are unequal and items are too. So the cost of an item is measured for each slot, a batch aims at the same time on
all of them, and the last items are shared out by speed. A wrong guess is repaired by the slot, which gives back what it
could not do in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ugro.policy.batching.aims import Aims

_FORGETTING = 0.5  # of what was measured before, at each answer
_GROWTH = 16  # from one batch to the next: a few quick items say little about the others
_LEAST_COST_S = 1e-7


@dataclass(slots=True)
class Cost:
    """Of an item, on one slot or on all: recent answers count more."""

    items: float = 0.0
    seconds: float = 0.0
    largest: int = 0  # items of one answer

    def note(self, items: int, seconds: float) -> None:
        if items > 0:
            self.items = self.items * _FORGETTING + items
            self.seconds = self.seconds * _FORGETTING + seconds
            self.largest = max(self.largest, items)

    @property
    def per_item_s(self) -> float | None:
        return max(self.seconds / self.items, _LEAST_COST_S) if self.items else None


@dataclass(slots=True)
class Sizes:
    """Bytes of an item or of a result, the average of all that were seen."""

    items: int = 0
    bytes: int = 0

    def note(self, items: int, size: int) -> None:
        self.items += items
        self.bytes += size

    def most(self, limit_bytes: int) -> int | None:
        """Items that fit; None: not known."""
        return max(1, limit_bytes * self.items // self.bytes) if self.bytes else None


@dataclass(frozen=True, slots=True)
class SlotView:
    """What is known when the next batch of a slot is cut."""

    cost: Cost
    share: float  # of the speed of all slots
    remaining: int | None  # items that nobody has yet; None: an input that does not say its length
    arguments: Sizes
    results: Sizes


def slice_size(view: SlotView, aims: Aims) -> int:
    cost_s = view.cost.per_item_s
    if cost_s is None:
        size = float(aims.probe_items)
        if view.remaining is not None:  # every slot gets a part of few items
            size = min(size, view.remaining * view.share)
    else:
        size = min(aims.batch_s / cost_s, float(max(aims.probe_items, _GROWTH * view.cost.largest)))
        if view.remaining is not None:
            size = min(size, max(view.remaining * view.share / 2, aims.least_s / cost_s))
    for known in (view.arguments.most(aims.most_bytes), view.results.most(aims.most_bytes)):
        size = size if known is None else min(size, known)
    return max(1, int(size))


def takes_another(waiting_s: float | None, in_flight: int, aims: Aims) -> bool:
    """Whether a slot gets one more batch.

    ``waiting_s``: the work that it already has, None if its cost is not known. While the first is measured or long,
    a second one would only wait where others could begin with it.
    """
    if in_flight == 0:
        return True
    return in_flight < aims.in_flight and waiting_s is not None and waiting_s <= 1.5 * aims.batch_s


def share_of(slot: int, costs: Mapping[int, Cost], overall: Cost, starting: int) -> float:
    """The speed of a slot as a part of all; one that was not measured or is ``starting`` counts as an average one."""
    average_s = overall.per_item_s or 1.0
    speeds = {number: 1.0 / (cost.per_item_s or average_s) for number, cost in costs.items()}
    return speeds[slot] / (sum(speeds.values()) + starting / average_s)
