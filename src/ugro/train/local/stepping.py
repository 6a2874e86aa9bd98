"""The steps of a rank between two exchanges: nothing is exchanged in them, and their times are added up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ugro.core.errors import UsageError
from ugro.policy.training import nan
from ugro.policy.training.nan import Incident
from ugro.train.balance import Verdict
from ugro.train.clock import Moments, after_ready, phases
from ugro.train.stepping import Stepping


@dataclass(slots=True)
class Tally:
    """What a rank did in a round so far."""

    begun: Any  # a moment of the device
    steps: int = 0
    used: int = 0
    mass: float = 0.0
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    losses: list[tuple[Any, int]] = field(default_factory=list)
    left_out: float = 0.0  # the mass of steps whose update this rank has left out
    unseen: list[Moments] = field(default_factory=list)  # steps of which it is not known whether they are finite
    stops_for: str = ""  # why the run is to end

    def loss(self) -> float:
        samples = sum(count for _, count in self.losses)
        return math.fsum(float(loss) * count for loss, count in self.losses) / samples if samples else math.nan


class LocalStepping(Stepping):
    exchanges_steps = False
    tally: Tally | None = None  # None: between rounds
    settle: Callable[[], None] = staticmethod(lambda: None)  # makes the ranks' models one, if they are not
    _counted: Moments | None = None

    @property
    def is_hooked(self) -> bool:
        return False

    def weight(self, samples: int | None = None, begin: int = 0) -> float:
        """Of a mean loss over ``samples`` in this rank's own step."""
        slice_ = self.slice
        return 1.0 if slice_ is None else slice_.part(begin, slice_.own if samples is None else samples)

    def begin(self, micro_batches: int = 1) -> Moments:
        if self.slice is None or self.tally is None:
            raise UsageError(
                "with local SGD, a step needs a batch of run.loader", hint="take batches from it, or train without it"
            )
        self.count_times()
        return super().begin(micro_batches)

    def finish(self) -> Verdict:
        self._note_foreign_backward(self._moments)
        moments, self._moments = self._moments, None
        if self.is_out_of_memory:
            return Verdict(stops=False, repeats=True)
        if moments is None or self.tally is None:
            return Verdict(stops=False, repeats=False)
        if moments.ready is None:  # another library called backward
            moments.ready = moments.synced = self._history.clock.now()
        if not self._has_decided:
            self._look(moments)
        if moments.loss is not None and not self.finite.response.skips:
            self.tally.losses.append((moments.loss, moments.share))
        self.tally.steps += 1
        if self.tracer is not None:
            self.tracer.after_step(self.progress.step, 0)
        return Verdict(stops=False, repeats=False)

    # --- numbers that are not finite ----------------------------------------------------------------------------

    def _hear_early(self, moments: Moments) -> None:
        self._note_foreign_backward(moments)
        if moments.ready is not None:
            self._look(moments)

    def _look(self, moments: Moments) -> None:
        assert self.tally is not None
        self._has_decided = True
        self.tally.unseen.append(moments)
        if self.finite.sees_now:
            self.look_back()

    def look_back(self) -> None:
        """At steps that the device has done. Nobody else has their gradients: this rank leaves out an update alone."""
        assert self.tally is not None
        unseen, self.tally.unseen = self.tally.unseen, []
        for moments in unseen:
            wrong = self.finite.wrong(moments)
            found = [] if wrong is None else [Incident(self.called, moments.step, *wrong)]
            self.finite.response = response = nan.response(self.finite.choice, found, self.finite.response.in_a_row)
            self.tally.stops_for = self.tally.stops_for or response.stops or ""
            if response.skips:
                self._leave_out()
                weights = None if self.slice is None else self.slice.weights
                self.tally.left_out += moments.share if weights is None else weights.total
            if found and not response.stops:
                self.finite.tell(found[0], is_left_out=response.skips)

    def look_at_last(self) -> None:
        """The reports of rounds are about all steps."""

    @property
    def called(self) -> str:
        return self._called(self.group.rank, self.group.ranks)

    def expect_together(self) -> None:
        if self.tally is not None:
            raise UsageError(
                "within a round, ranks are not in the same step", hint="call it before or after an epoch's batches"
            )
        self.settle()

    def mean(self, loss: float) -> float:
        self.expect_together()
        return super().mean(loss)

    def average(self, parameters: Any, *, is_repeated: bool = True) -> None:
        """Gradients stay this rank's own."""

    def own_s(self) -> float:
        """Returns how long this rank has computed in this round, when its device has done all of it.

        An exchange that goes on beside the computation is not waited for.
        """
        assert self.tally is not None
        now = self.now()
        seconds = self.clock.between(self.tally.begun, now)
        self.count_times()
        return seconds

    def count_times(self) -> None:
        """Adds the times of the newest step that can be read."""
        moments = self._history.latest if self._history.clock.lag == 0 else self._history.before_latest
        if moments is None or moments is self._counted or moments.ready is None or self.tally is None:
            return
        self._counted = moments
        found = phases(self._history.clock, moments)
        self.tally.data_s += found.data_s
        self.tally.forward_s += found.forward_s
        self.tally.backward_s += found.backward_s
        self.tally.optimizer_s += after_ready(self._history.clock, moments)[1]
