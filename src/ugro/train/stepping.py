"""The steps of this rank: its share, the times of its parts, and the exchange of measurements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ugro.train.balance import Balance, Verdict
from ugro.train.batchnorm import Company
from ugro.train.clock import Moments
from ugro.train.group import Gathering, Group
from ugro.train.parallel.way import Way
from ugro.train.part import PartOfShare
from ugro.train.sampler import Progress, Slice
from ugro.train.telemetry import History, Word, of_units
from ugro.train.trace import Tracer
from ugro.train.trial import Trial

if TYPE_CHECKING:
    from ugro.train.elastic.membership import Elastic


class Observer(Protocol):
    def observe(self, words: Sequence[Word], *, repeats: bool) -> None: ...


class Stepping:
    def __init__(self, group: Group, history: History, balance: Balance, progress: Progress) -> None:
        self.group = group
        self.balance = balance
        self.progress = progress
        self.company = Company()
        self.model: Any = None  # as wrapped; its hook notes when the last gradients are ready
        self.way: Way | None = None  # in which the model is spread over the ranks
        self.slice: Slice | None = None
        self.cap: int | None = None  # samples that fit into this device, if known
        self.is_out_of_memory = False
        self.is_asked_to_stop = False
        self.tracer: Tracer | None = None
        self.part: PartOfShare | None = None
        self.trial: Trial | None = None
        self.elastic: Elastic | None = None
        self.rewrap: Callable[[], None] | None = None  # wraps the model again, for a group with other members
        self.compression: Observer | None = None  # of gradients
        self.kept: dict[str, Any] = {}  # what the run keeps in checkpoints
        self.stops = False  # all ranks know it, and stop after the same step
        self.regroups = False  # the same: a rank waits to join
        self._history = history
        self._gathering: Gathering | None = None
        self._moments: Moments | None = None
        self._early_waits: list[tuple[Any, Any]] = []  # since the last step; they count in the next one
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
        """DDP tells us when the last gradients are ready."""
        return self.group.is_distributed and hasattr(self.model, "no_sync") and not self.is_lockstep

    @property
    def is_lockstep(self) -> bool:
        return self.way is not None and self.way.is_lockstep

    @property
    def units(self) -> tuple[int, ...]:
        return self.way.units if self.way is not None else tuple(range(self.group.ranks))

    @property
    def _separates_waiting(self) -> bool:
        return self.is_hooked or self.group.ranks == 1 or (self.way is not None and self.way.reports_waits)

    @property
    def is_dummy(self) -> bool:
        return self.slice is not None and self.slice.own == 0

    def begin(self, micro_batches: int = 1) -> Moments:
        if self.elastic is not None:
            self.elastic.meeting.spoke()
        slice_ = self.slice
        step = self.progress.step if slice_ is None else slice_.step
        moments = Moments(step, 0 if slice_ is None else slice_.own, micro_batches)
        moments.data_s, self._data_s = self._data_s, 0.0
        moments.is_clean, self._is_clean = self._is_clean and self._separates_waiting, True
        moments.waits, self._early_waits = self._early_waits, []
        self.company.is_dummy, self.company.waited_s = self.is_dummy, 0.0
        if self.trial is not None:
            self.trial.before_step(step, moments.share)
        self._moments = self._history.begin(moments)
        return self._moments

    def weight(self, samples: int | None = None, begin: int = 0) -> float:
        """The weight of a mean loss over ``samples``, such that the mean over ranks is that of the batch."""
        if samples == 0:
            return 0.0
        if self.slice is None:
            return 1.0
        if self.is_dummy:
            return 0.0
        return len(set(self.units)) * self.slice.part(begin, self.slice.own if samples is None else samples)

    def common_parts(self) -> int:
        """Into how many parts every rank divides its share, if all need the same number."""
        slice_, balancer = self.slice, self.balance.balancer
        if slice_ is None or balancer is None:
            return 1
        needed = (-(-share // cap) for share, cap in zip(slice_.shares, balancer.caps, strict=True) if cap)
        return max(slice_.most_micro_batches, *needed, 1)

    def part_of_own(self, samples: int, begin: int, present: int) -> float:
        """How much some samples count among those of this rank."""
        slice_ = self.slice
        if slice_ is None or slice_.weights is None or self.is_dummy:
            return samples / present
        own = slice_.part(0, slice_.own)
        return slice_.part(begin, samples) / own if own else samples / present

    def _reported(self, loss: Any) -> Any:
        """The loss such that its mean over samples is the one of the batch, also where samples have weights."""
        slice_ = self.slice
        if slice_ is None or slice_.weights is None or self.is_dummy:
            return loss
        return loss * (slice_.part(0, slice_.own) * slice_.total / slice_.own)

    def forward_done(self, loss: Any) -> None:
        if self._moments is not None:
            self._moments.forward_done = self._history.clock.now()
            self._moments.loss = self._history.clock.kept(self._reported(loss))

    def backward(self, loss: Any, samples: int | None = None, scaler: Any = None, begin: int = 0) -> None:
        moments = self._moments
        if moments is not None:
            moments.backward_begun = self._history.clock.now()
        weighted = loss * self.weight(samples, begin)
        (weighted if scaler is None else scaler.scale(weighted)).backward()
        self.backward_done()

    def backward_done(self) -> None:
        if self._moments is None:
            return
        if self._gathering is None and not self.is_hooked:
            self._moments.ready = self._history.clock.now()
        if self._moments.ready is not None:
            self._moments.synced = self._history.clock.now()

    def now(self) -> Any:
        return self._history.clock.now()

    def waited(self, since: Any) -> None:
        """This rank waited for others since then, and did not compute."""
        waits = self._early_waits if self._moments is None else self._moments.waits
        waits.append((since, self.now()))

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
        if self.elastic is not None and self.elastic.meeting.has_joiners:
            word = replace(word, regroups=True)
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
        return self.conclude(of_units([Word.of(numbers) for numbers in self._gathered(gathering)], self.units))

    def exchanged(self, word: Word) -> list[Word]:
        """The words of all ranks."""
        return [Word.of(numbers) for numbers in self.group.gather(word.numbers()).wait()]

    def conclude(self, words: list[Word]) -> Verdict:
        """All ranks have the same words about this step."""
        self._moments = None
        step = self.progress.step if self.slice is None else self.slice.step
        verdict = self.balance.digest(words, step, self.progress.epoch)
        self.stops, self.regroups = self.stops or verdict.stops, self.regroups or verdict.regroups
        if self.compression is not None:
            self.compression.observe(words, repeats=verdict.repeats)
        self._trace(step, verdict.trace_steps)
        if self.trial is not None and self.trial.after_step(step, self.balance.holds_from, self.slice is not None):
            self.is_asked_to_stop = True
        self.count_step()
        return verdict

    def count_step(self) -> None:
        if self.slice is not None:
            self.progress.cursor, self.progress.step = self.slice.cursor, self.slice.step + 1
        else:
            self.progress.step += 1

    def abandon(self) -> Any:
        """A step that came to nothing; returns the loss of this rank's share, or NaN if it was not computed."""
        self._gathering = self._moments = None
        self.is_out_of_memory = False
        self._is_clean = False
        loss = self._history.forget()
        return math.nan if loss is None else loss

    def expect_together(self) -> None:
        """All ranks do something else now, between the same two steps."""
        self.disturb()

    def average(self, parameters: Any) -> None:
        """Of gradients that a rank has computed by itself."""
        self.group.average(parameters)

    def _gathered(self, gathering: Gathering) -> list[list[float]]:
        if not self.is_lockstep:
            return gathering.wait()
        since = self.now()
        numbers = gathering.wait()
        self.waited(since)  # it was sent after the optimizer, which takes some ranks longer than others
        return numbers

    def close(self) -> None:
        if self.way is not None:
            self.way.close()
        self.group.close()

    def _trace(self, step: int, asked: int) -> None:
        tracer = self.tracer
        if tracer is None:
            return
        was_tracing = tracer.is_tracing
        tracer.after_step(step, asked)
        if was_tracing or tracer.is_tracing:
            self.disturb()  # recording takes time, and not the same on every rank
