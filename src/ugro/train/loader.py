"""This rank's share of each batch; its size follows the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ugro.train.sampler import Order, Progress, Schedule, Slice, slices


class Course(Protocol):
    """What a run does around each batch."""

    progress: Progress

    def boundary(self) -> None: ...
    def fetching(self) -> None: ...
    def fetched(self, slice_: Slice) -> None: ...
    def exhausted(self) -> None: ...


@dataclass(slots=True)
class _Batches:
    """Lists of indices for torch's loader, which may request some long before they are used."""

    make: Callable[[], Iterator[Slice]]
    handed_out: deque[Slice]
    steps: int

    def __iter__(self) -> Iterator[list[int]]:
        for slice_ in self.make():
            self.handed_out.append(slice_)
            yield slice_.indices

    def __len__(self) -> int:
        return self.steps


class Loader:
    def __init__(
        self, course: Course, dataset: Any, order: Order, schedule: Schedule, rank: int, options: dict[str, Any]
    ) -> None:
        from torch.utils.data import DataLoader

        self._course = course
        self.order = order
        self.is_endless = False  # a trial ends by itself, and the script's epochs do not
        self._handed_out: deque[Slice] = deque()
        batches = _Batches(lambda: slices(order, schedule, course.progress, rank), self._handed_out, order.steps)
        self._torchs = DataLoader(dataset, batch_sampler=batches, **options)

    def __len__(self) -> int:
        return self.order.steps

    def __iter__(self) -> Iterator[Any]:
        yield from self._epoch()
        while self.is_endless:
            yield from self._epoch()

    def _epoch(self) -> Iterator[Any]:
        progress = self._course.progress
        if progress.cursor >= self.order.end:  # the script counts epochs itself
            progress.epoch, progress.cursor = progress.epoch + 1, 0
        self._handed_out.clear()
        batches = iter(self._torchs)
        is_first = True
        while True:
            # Not after the last batch: what the script does at the end of an epoch belongs to the epoch.
            if (not is_first and progress.cursor < self.order.end) or self.is_endless:
                self._course.boundary()
            is_first = False
            self._course.fetching()
            try:
                batch = next(batches)
            except StopIteration:
                break
            slice_ = self._handed_out.popleft()
            self._course.fetched(slice_)
            yield batch
            # Also for a batch without a step.
            progress.cursor, progress.step = slice_.cursor, slice_.step + 1
        self._course.exhausted()


def lead(num_workers: int, prefetch_factor: int | None) -> int:
    """How many batches torch's loader requests ahead."""
    return num_workers * (2 if prefetch_factor is None else prefetch_factor)
