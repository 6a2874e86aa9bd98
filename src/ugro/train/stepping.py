"""One step after the other on this rank: how much it takes of each, when its parts happened, what all then know."""

from __future__ import annotations

import time
from typing import Any

from ugro.train.balance import Balance, Verdict
from ugro.train.batchnorm import Company
from ugro.train.clock import Moments
from ugro.train.group import Gathering, Group
from ugro.train.sampler import Progress, Slice
from ugro.train.telemetry import History, Word


class Stepping:
    def __init__(self, group: Group, history: History, balance: Balance, progress: Progress) -> None:
        self.group = group
        self.balance = balance
        self.progress = progress
        self.company = Company()
        self.model: Any = None  # as wrapped; its hook tells when the last gradients are ready
        self.slice: Slice | None = None
        self.cap: int | None = None  # samples that this device holds at once, as far as it was found out
        self.is_out_of_memory = False
        self.is_asked_to_stop = False
        self.stops = False  # all ranks know of it, and stop behind the same step
        self._history = history
        self._gathering: Gathering | None = None
        self._moments: Moments | None = None
        self._fetching_since: float | None = None
        self._data_s = 0.0
        self._is_clean = True

    # --- data ---------------------------------------------------------------------------------------------------

    def fetching(self) -> None:
        self._history.end()
        self._fetching_since = time.perf_counter()

    def fetched(self, slice_: Slice) -> None:
        self.slice = slice_
        if self._fetching_since is not None:
            self._data_s = time.perf_counter() - self._fetching_since

    def exhausted(self) -> None:
        self.slice = None

    def disturb(self) -> None:
        """The time until the next step is not a rank's own: all did something else together."""
        self._is_clean = False

    # --- a step -------------------------------------------------------------------------------------------------

    @property
    def is_hooked(self) -> bool:
        return self.group.ranks > 1 and hasattr(self.model, "no_sync")

    @property
    def is_dummy(self) -> bool:
        return self.slice is not None and self.slice.own == 0

    def begin(self, micro_batches: int = 1) -> Moments:
        slice_ = self.slice
        step = self.progress.step if slice_ is None else slice_.step
        moments = Moments(step, 0 if slice_ is None else slice_.own, micro_batches)
        moments.data_s, self._data_s = self._data_s, 0.0
        # Without our hook, nobody can tell computing from waiting.
        moments.is_clean, self._is_clean = self._is_clean and (self.is_hooked or self.group.ranks == 1), True
        self.company.is_dummy, self.company.waited_s = self.is_dummy, 0.0
        self._moments = self._history.begin(moments)
        return self._moments

    def weight(self, samples: int | None = None) -> float:
        """What the mean loss over ``samples`` of this rank counts, so that the mean over ranks is that of the batch."""
        if self.slice is None:
            return 1.0
        if self.is_dummy:
            return 0.0
        return self.group.ranks * (self.slice.own if samples is None else samples) / self.slice.total

    def forward_done(self, loss: Any) -> None:
        if self._moments is not None:
            self._moments.forward_done = self._history.clock.now()
            self._moments.loss = self._history.clock.kept(loss)

    def backward(self, loss: Any, samples: int | None = None, scaler: Any = None) -> None:
        moments = self._moments
        if moments is not None:
            moments.backward_begun = self._history.clock.now()
        weighted = loss * self.weight(samples)
        (weighted if scaler is None else scaler.scale(weighted)).backward()
        self.backward_done()

    def backward_done(self) -> None:
        if self._moments is None:
            return
        if self._gathering is None and not self.is_hooked:
            self._moments.ready = self._history.clock.now()
        if self._moments.ready is not None:
            self._moments.synced = self._history.clock.now()

    def bucket(self, bucket: Any, reduce: Any) -> Any:
        """DDP has gradients for the others, on all ranks in the same order; with the last ones, all is ready."""
        is_last = self._moments is not None and bucket.is_last()
        if is_last:
            assert self._moments is not None
            self._moments.ready = self._history.clock.now()
        future = reduce(None, bucket)
        if is_last:
            self._tell()
        return future

    def _tell(self) -> None:
        moments = self._moments
        if moments is not None:
            moments.inner_wait_s = self.company.waited_s
        word = self._history.word(stops=self.is_asked_to_stop, is_out_of_memory=self.is_out_of_memory, cap=self.cap)
        self._gathering = self.group.gather(word.numbers())

    def finish(self) -> Verdict:
        """All ranks know the same now; every rank comes here once per step."""
        moments, self._moments = self._moments, None
        if self._gathering is None:
            if moments is None or (moments.ready is None and not self.is_out_of_memory):
                return Verdict(stops=False, repeats=False)  # there was no backward
            self._tell()
        if moments is not None and moments.synced is None:  # somebody else called backward
            moments.synced = self._history.clock.now()
        gathering, self._gathering = self._gathering, None
        assert gathering is not None
        words = [Word.of(numbers) for numbers in gathering.wait()]
        step = self.progress.step if self.slice is None else self.slice.step
        verdict = self.balance.digest(words, step, self.progress.epoch)
        self.stops = self.stops or verdict.stops
        if self.slice is not None:
            self.progress.cursor, self.progress.step = self.slice.cursor, self.slice.step + 1
        else:
            self.progress.step += 1
        return verdict
