"""The steps of this rank: its share, the times of its parts, and the exchange of measurements."""

from __future__ import annotations

import time
from typing import Any

from ugro.train.balance import Balance, Verdict
from ugro.train.batchnorm import Company
from ugro.train.clock import Moments
from ugro.train.group import Gathering, Group
from ugro.train.part import PartOfShare
from ugro.train.sampler import Progress, Slice
from ugro.train.telemetry import History, Word
from ugro.train.trace import Tracer
from ugro.train.trial import Trial


class Stepping:
    def __init__(self, group: Group, history: History, balance: Balance, progress: Progress) -> None:
        self.group = group
        self.balance = balance
        self.progress = progress
        self.company = Company()
        self.model: Any = None  # as wrapped; its hook notes when the last gradients are ready
        self.slice: Slice | None = None
        self.cap: int | None = None  # samples that fit into this device, if known
        self.is_out_of_memory = False
        self.is_asked_to_stop = False
        self.tracer: Tracer | None = None
        self.part: PartOfShare | None = None
        self.trial: Trial | None = None
        self.stops = False  # all ranks know it, and stop after the same step
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
        """Excludes the time until the next step from the rank's own time: all ranks did something else."""
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
        # Without our hook, computing and waiting cannot be separated.
        moments.is_clean, self._is_clean = self._is_clean and (self.is_hooked or self.group.ranks == 1), True
        self.company.is_dummy, self.company.waited_s = self.is_dummy, 0.0
        self._moments = self._history.begin(moments)
        return self._moments

    def weight(self, samples: int | None = None) -> float:
        """The weight of a mean loss over ``samples``, such that the mean over ranks is that of the batch."""
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
        """DDP's hook, called with a bucket of gradients, in the same order on all ranks."""
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
        word = self._history.word(
            stops=self.is_asked_to_stop,
            is_out_of_memory=self.is_out_of_memory,
            cap=self.cap,
            trace_steps=self.tracer.asked() if self.tracer is not None else 0,
            part=self.part.asked() if self.part is not None else 1.0,
        )
        self._gathering = self.group.gather(word.numbers())

    def finish(self) -> Verdict:
        """Called once per step on every rank, when all ranks have the same measurements."""
        moments, self._moments = self._moments, None
        if self._gathering is None:
            if moments is None or (moments.ready is None and not self.is_out_of_memory):
                return Verdict(stops=False, repeats=False)  # there was no backward
            self._tell()
        if moments is not None and moments.synced is None:  # another library called backward
            moments.synced = self._history.clock.now()
        gathering, self._gathering = self._gathering, None
        assert gathering is not None
        words = [Word.of(numbers) for numbers in gathering.wait()]
        step = self.progress.step if self.slice is None else self.slice.step
        verdict = self.balance.digest(words, step, self.progress.epoch)
        self.stops = self.stops or verdict.stops
        self._trace(step, verdict.trace_steps)
        if self.trial is not None and self.trial.after_step(step, has_loader=self.slice is not None):
            self.is_asked_to_stop = True
        if self.slice is not None:
            self.progress.cursor, self.progress.step = self.slice.cursor, self.slice.step + 1
        else:
            self.progress.step += 1
        return verdict

    def _trace(self, step: int, asked: int) -> None:
        tracer = self.tracer
        if tracer is None:
            return
        was_tracing = tracer.is_tracing
        tracer.after_step(step, asked)
        if was_tracing or tracer.is_tracing:
            self.disturb()  # recording takes time, and not the same on every rank
