"""The batches of a rank's own steps, round by round."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ugro.policy.local.rounds import batches
from ugro.train.loader import Course, torchs
from ugro.train.local.course import LocalCourse, Share
from ugro.train.pieces import Handed
from ugro.train.sampler import Order, Slice, Weights


@dataclass(slots=True)
class _Round:
    """Lists of indices for torch's loader."""

    slices: list[Slice] = field(default_factory=list)
    handed_out: deque[Slice] = field(default_factory=deque)

    def __iter__(self) -> Iterator[list[int]]:
        for slice_ in self.slices:
            self.handed_out.append(slice_)
            yield slice_.indices

    def __len__(self) -> int:
        return len(self.slices)


class LocalLoader:
    def __init__(self, run: Course, course: LocalCourse, dataset: Any, order: Order, options: dict[str, Any]) -> None:
        import torch

        self._run = run
        self._course = course
        self.order = order
        self._round = _Round()
        self._chance = None if "generator" in options else torch.Generator()
        # Loader processes that live longer than a round: each would start them again.
        lasting = {"persistent_workers": True} if options.get("num_workers", 0) else {}
        given = {"generator": self._chance, **lasting, **options}
        self._torchs = torchs(dataset, self._round, order, given)

    def __len__(self) -> int:
        """In global batches; a rank's own steps are more or fewer."""
        return self.order.steps

    def __iter__(self) -> Iterator[Any]:
        progress = self._run.progress
        if progress.cursor >= self.order.end:  # the script counts epochs itself
            progress.epoch, progress.cursor = progress.epoch + 1, 0
        permutation = self.order.of(progress.seed, progress.epoch)
        for share in self._course.rounds_of_epoch():
            if share.ranges:
                yield from self._batches(share, permutation)
        self._run.exhausted()
        if progress.cursor < self.order.end:
            self._run.boundary()

    def _batches(self, share: Share, permutation: Any) -> Iterator[Any]:
        self._round.slices = self._slices(share, permutation)
        self._round.handed_out.clear()
        progress, count = self._run.progress, len(self._round.slices)
        if self._chance is not None:
            key = (progress.seed, progress.epoch, share.ranges[0][0], self._course.stepping.group.rank)
            self._chance.manual_seed(hash(key) % 2**63)
        ready = iter(self._torchs)
        for number in range(count):
            if number and self._course.between_steps():
                break
            self._run.fetching()
            batch, rules = next(ready)
            slice_ = self._round.handed_out.popleft()
            self._run.fetched(slice_, Handed(batch, rules, slice_.own))
            steps = self._steps
            try:
                yield batch
            except GeneratorExit:
                if self._steps > steps:  # the script leaves its loop after the step
                    self._use(slice_, (number + 1) / count)
                raise
            self._use(slice_, (number + 1) / count)
        self._run.fetching()  # ends the last step

    @property
    def _steps(self) -> int:
        tally = self._course.stepping.tally
        return 0 if tally is None else tally.steps

    def _use(self, slice_: Slice, part: float) -> None:
        tally = self._course.stepping.tally
        assert tally is not None
        tally.used += slice_.own
        tally.mass += slice_.own if slice_.weights is None else slice_.weights.total
        self._run.progress.step = self._course.step_after(part)

    def _slices(self, share: Share, permutation: Any) -> list[Slice]:
        assert self._course.rounds is not None
        indices = [index for begin, end in share.ranges for index in permutation[begin:end].tolist()]
        made, begin = [], 0
        for own in batches(len(indices), self._course.rounds.wish.batch):
            some = indices[begin : begin + own]
            weights = None
            if self.order.weights is not None:
                each = self.order.weights[some].tolist()
                weights = Weights(each, math.fsum(each))
            made.append(Slice(self._run.progress.step, (own,), own, 1, 0, some, weights))
            begin += own
        return made
