"""This rank's share of each batch; its size follows the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ugro.core.errors import UsageError
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
        import torch
        from torch.utils.data import DataLoader

        self._course = course
        self.order = order
        self.is_endless = False  # a trial ends by itself, and the script's epochs do not
        self.schedule, self.rank = schedule, rank
        self._handed_out: deque[Slice] = deque()
        self._latest: Any = None  # the batch that the script has
        self._is_outdated = False  # what was loaded ahead is for other ranks
        self._is_repeated = False  # the step of the latest batch did not take place
        batches = _Batches(
            lambda: slices(order, self.schedule, course.progress, self.rank), self._handed_out, order.steps
        )
        # Of torch's own random numbers, each epoch would take one more: also one that is resumed in its middle.
        self._chance = None if "generator" in options else torch.Generator()
        self._torchs = DataLoader(dataset, batch_sampler=batches, **{"generator": self._chance, **options})

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
        batches = self._begun()
        is_first = True
        while True:
            # Not after the last batch: what the script does at the end of an epoch belongs to the epoch.
            if (not is_first and progress.cursor < self.order.end) or self.is_endless:
                self._course.boundary()
            is_first = False
            self._course.fetching()
            if self._is_outdated:
                batches = self._begun()
            try:
                batch = next(batches)
            except StopIteration:
                break
            slice_ = self._handed_out.popleft()
            self._course.fetched(slice_)
            self._latest, self._is_repeated = batch, False
            yield batch
            # Also for a batch without a step.
            if not self._is_repeated:
                progress.cursor, progress.step = slice_.cursor, slice_.step + 1
        self._latest = None
        self._course.exhausted()

    def _begun(self) -> Iterator[Any]:
        """The rest of the epoch."""
        progress = self._course.progress
        self._is_outdated = False
        self._handed_out.clear()
        if self._chance is not None:  # from which the loader processes get their seeds
            self._chance.manual_seed(hash((progress.seed, progress.epoch, progress.cursor, self.rank)) % 2**63)
        return iter(self._torchs)

    # --- other ranks --------------------------------------------------------------------------------------------

    def regroup(self, rank: int, schedule: Schedule) -> None:
        self.rank, self.schedule, self._is_outdated = rank, schedule, True

    def again(self, batch: Any) -> Any:
        """The batch of the same step for the ranks that there are now, if ``batch`` is what the loader handed out.

        None if the script has made something else of it: then the loader hands it out next.
        """
        kind = _same(batch, self._latest)
        if kind is None:
            self._is_repeated = True
            return None
        slice_ = next(slices(self.order, self.schedule, self._course.progress, self.rank))
        self._course.fetched(slice_)
        dataset, indices = self._torchs.dataset, slice_.indices
        many = getattr(dataset, "__getitems__", None)
        samples = many(indices) if many is not None else [dataset[index] for index in indices]
        made = self._torchs.collate_fn(samples)
        return made if kind is object else kind(made)


def _same(given: Any, handed_out: Any) -> type | None:
    """As what the script passed a batch on: unchanged, or taken apart and put into a list or tuple; None: changed."""
    if given is None or handed_out is None:
        return None
    if given is handed_out:
        return object
    if type(given) in (list, tuple) and type(handed_out) in (list, tuple) and len(given) == len(handed_out):
        return type(given) if all(one is other for one, other in zip(given, handed_out, strict=True)) else None
    return None


def lead(num_workers: int, prefetch_factor: int | None) -> int:
    """How many batches torch's loader requests ahead."""
    return num_workers * (2 if prefetch_factor is None else prefetch_factor)


def checked_weights(weights: Any, samples: int) -> Any:
    """A tensor on the CPU; None if all samples count the same."""
    if weights is None:
        return None
    import torch

    found = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if found.shape != (samples,):
        raise UsageError(f"{tuple(found.shape)} weights for {samples} samples", hint="give one number for each sample")
    if not bool((found.isfinite() & (found >= 0)).all()):
        raise UsageError("weights of samples are numbers that are not negative")
    return found
