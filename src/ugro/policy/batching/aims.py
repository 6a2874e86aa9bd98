"""The aims of a map: how long a batch should take, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aims:
    batch_s: float = 0.15  # work in a batch: long against its overhead, short against the whole
    least_s: float = 0.01  # work in a batch at the end, when the rest is shared out
    probe_items: int = 64  # in the first batch of a slot, as its cost is not known yet
    probe_s: float = 0.02  # after which a slot gives the rest of its first batch back
    most_bytes: int = 8 << 20  # of a batch's items, and of its results
    most_buffered_bytes: int = 64 << 20  # of results that wait for their reader
    batches_ahead: int = 4  # per slot: results that could be read and were not
    in_flight: int = 2  # batches per slot, so that none waits for the next one

    def budget_s(self, expected_s: float) -> float:
        """After which a slot gives the rest of a batch back: twice what was expected."""
        return min(2 * self.batch_s, max(2 * expected_s, self.probe_s))
