"""The rounds of a rank: what it computes in each, and how the ranks' models become one again.

All ranks conclude all rounds in the same order, from the same reports, so each knows what every rank has to compute,
without a server. The exchange of a round's changes goes on while the next round is computed, unless the ranks wait for
each other (``max_staleness`` 0).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.kernel.support.errors import UsageError
from ugro.train import local_exchange as exchange
from ugro.train.balance import Verdict
from ugro.train.failures import NotFinite
from ugro.train.local_exchange import Change, Meeting, Recorder, Report, Reports, RoundNumbers, Values
from ugro.train.rules import failures as nan
from ugro.train.rules.failures import Incident, OnNan, Wrong
from ugro.train.rules.sync import Outer, Ranges, RoundPlan, Rounds, Sync, Update, judge, merged, patience_s, size, take
from ugro.train.samples import Order
from ugro.train.stepping import Stepping
from ugro.train.telemetry import Moments, after_ready, phases

# --- outer ------------------------------------------------------------------------------------------------------------
# What becomes of the average change of a round: it is taken as it is, or as a step of an outer optimizer (DiLoCo).


_RATE, _MOMENTUM = 0.7, 0.9


class OuterStep:
    def __init__(self, kind: Outer) -> None:
        self._kind = kind
        self._momentum: dict[str, Any] = {}  # by parameter

    def update(self, mean: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        """``names``: of the parameters, which come first; the others, such as statistics, are averaged."""
        if self._kind is Outer.AVERAGE:
            return mean
        self._momentum = {name: held for name, held in self._momentum.items() if name in set(names)}
        steps = [self._step(name, one) for name, one in zip(names, mean, strict=False)]
        return [*steps, *mean[len(names) :]]

    def _step(self, name: str, change: Any) -> Any:
        """As torch's SGD with Nesterov momentum, whose gradient is the change, with the other sign."""
        held = self._momentum.get(name)
        if held is None:
            held = self._momentum[name] = change.clone()
        else:
            held.mul_(_MOMENTUM).add_(change)
        return (change + _MOMENTUM * held).mul_(_RATE)

    def state(self) -> dict[str, Any]:
        return {name: one.cpu() for name, one in self._momentum.items()}

    def restore(self, state: Mapping[str, Any], device: Any) -> None:
        if self._kind is Outer.NESTEROV:
            self._momentum = {name: one.to(device).clone() for name, one in state.items()}


# --- stepping ---------------------------------------------------------------------------------------------------------
# The steps of a rank between two exchanges: nothing is exchanged in them, and their times are added up.


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


# --- course -----------------------------------------------------------------------------------------------------------


log = logging.getLogger("ugro.train")

_UNKNOWN_S = 60.0  # the patience with ranks of which nothing is known yet


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has to compute, and at the end of which round it should be done."""

    ranges: Ranges = ()
    number: int = 0

    @property
    def samples(self) -> int:
        return size(self.ranges)


class LocalCourse:
    def __init__(self, sync: Sync, stepping: LocalStepping, values: Values, recorder: Recorder) -> None:
        self.sync = sync
        self.stepping = stepping
        self.values = values
        self.outer = OuterStep(sync.outer)
        self.rejected = 0  # samples whose updates came too late, of all ranks
        self.wants_checkpoint = False
        self._recorder = recorder
        self._group = stepping.group
        self._meeting = Meeting(self._group, sync.max_staleness)
        self._bulk: Any = self._group.second()
        self._flight: exchange.Flight | None = None
        self._number = 0  # of the round that is concluded next
        self._is_together = True
        self._is_saving = self._saves_now = False
        self._exposed_s = self._exchange_s = 0.0
        self._first_step = 0  # of this epoch
        self._epoch = -1  # that ``left`` is about
        self._unfinished: Tally | None = None  # of a round in which the script has left its loop
        self._is_leaving = False  # some rank has: all leave theirs after this round
        stepping.settle = self.settle
        self.order: Order | None = None
        self.rounds: Rounds | None = None
        self.plan = RoundPlan((), None, "")
        self.left: Ranges = ()  # positions in the epoch's order that no rank has
        self.shares: list[Share] = []
        self.save: Callable[[], object] = lambda: None
        self.resumed: Ranges | None = None  # what a checkpoint says is left of its epoch

    @property
    def own(self) -> Share:
        return self.shares[self._group.rank]

    @property
    def is_in_round(self) -> bool:
        return self.stepping.tally is not None

    # --- an epoch -----------------------------------------------------------------------------------------------

    def rounds_of_epoch(self) -> Iterator[Share]:
        """This rank's shares of the rest of the epoch; all ranks have one model before and after."""
        from torch import distributed

        self.settle()
        self.left, self._epoch = self._rest(), self.stepping.progress.epoch
        self.resumed, self._first_step = None, self._first_of_epoch()
        for one in self.values.thawed():  # they may have begun again, with other values on each rank
            distributed.broadcast(one.data, 0)
        self.values.agree()
        self.shares = [Share()] * self._group.ranks
        self._assign([True] * self._group.ranks)
        try:
            while self.left or any(share.ranges for share in self.shares):
                self.stepping.tally = Tally(self.stepping.now())
                yield self.own
                self._end_round()
                if self._is_ending and self._is_in_agreement():
                    return
        except GeneratorExit:
            self._unfinished = self.stepping.tally
            log.warning(
                "the loop over the loader was left in the middle of a round: this rank's model becomes that of all "
                "with the next run.checkpoint, run.gather or epoch"
            )
            raise
        finally:
            self._is_leaving = False
            self.stepping.tally = None

    def settle(self) -> None:
        """If the script has left its loop in the middle of a round: ends the round, and with it those of all ranks."""
        if self._unfinished is None:
            return
        self.stepping.tally = self._unfinished
        self._meeting.cut(self._number)
        try:
            self._end_round()
            while not self._is_in_agreement():
                self.stepping.tally = Tally(self.stepping.now())
                self._end_round()
        finally:
            self._unfinished = self.stepping.tally = None
            self._is_leaving = False

    def _rest(self) -> Ranges:
        """Positions of this epoch that nobody has used yet."""
        assert self.order is not None
        progress = self.stepping.progress
        if self.resumed is not None:
            return self.resumed
        if self.left and self._epoch == progress.epoch:  # the script has left its loop, and comes again
            return self.left
        return ((progress.cursor, self.order.end),)

    def _first_of_epoch(self) -> int:
        assert self.order is not None
        progress = self.stepping.progress
        return progress.step - -(-progress.cursor // self.order.global_batch)

    def _is_in_agreement(self) -> bool:
        return self._flight is None and not any(share.ranges for share in self.shares)

    @property
    def _is_ending(self) -> bool:
        return self.stepping.stops or self._is_leaving

    def _assign(self, free: list[bool]) -> None:
        """Shares for the ranks that have none, unless the run ends."""
        assert self.rounds is not None
        left = 0 if self._is_ending else size(self.left)
        self.plan = self.rounds.plan(left, free)
        for rank, samples in enumerate(self.plan.shares):
            if free[rank]:
                taken, self.left = take(self.left, samples)
                self.shares[rank] = Share(taken, self._number)
        is_last = not self.left or self._is_ending
        self._is_together = self.sync.max_staleness == 0 or is_last or self._is_saving

    # --- between two steps --------------------------------------------------------------------------------------

    def between_steps(self) -> bool:
        """Whether this rank is to end its round now."""
        stepping = self.stepping
        if self._flight is not None and self._flight.is_done:
            self._settle(is_agreement=False)
        if stepping.is_asked_to_stop:
            self._meeting.stop()
            return True
        if not self._meeting.is_due():
            return False
        while not self._is_together and self._meeting.is_decided(self._number):  # without this rank
            self._conclude(self._meeting.decided(self._number), None)
        return self._meeting.is_cut(self._number)

    # --- the end of a round -------------------------------------------------------------------------------------

    def _end_round(self) -> None:
        own_s, is_there = self.stepping.own_s(), False
        while not is_there:
            self._settle(is_agreement=False)
            change = self.values.change()
            report = self._report(own_s, change)
            meet = self._meeting.together if self._is_together else self._meeting.loosely
            reports = meet(self._number, report, _UNKNOWN_S if not self.plan.seconds else patience_s(self.plan.seconds))
            is_there = reports[self._group.rank] is not None
            self._conclude(reports, change)
        if self._saves_now:
            self._saves_now = False
            self.save()

    def _report(self, own_s: float, change: Change) -> Report:
        stepping, tally = self.stepping, self.stepping.tally
        assert tally is not None
        stepping.look_back()
        if not change.is_finite:
            self._tell_of_parameters(tally)
        return Report(
            used=tally.used, mass=tally.mass - tally.left_out, steps=tally.steps, loss=tally.loss(), own_s=own_s,
            data_s=tally.data_s, forward_s=tally.forward_s, backward_s=tally.backward_s, optimizer_s=tally.optimizer_s,
            exposed_s=self._exposed_s, exchange_s=self._exchange_s, largest=change.largest, exact=change.exact,
            part=stepping.part.asked() if stepping.part is not None else 1.0,
            trace_steps=stepping.tracer.asked() if stepping.tracer is not None else 0,
            stops=stepping.is_asked_to_stop, saves=self.wants_checkpoint, leaves=self._unfinished is not None,
            is_finite=change.is_finite, stops_for=tally.stops_for,
        )  # fmt: skip

    def _tell_of_parameters(self, tally: Tally) -> None:
        watch = self.stepping.finite
        incident = Incident(self.stepping.called, self.stepping.progress.step, Wrong.PARAMETERS)
        if watch.choice is OnNan.STOP:
            tally.stops_for = tally.stops_for or incident.words
        else:
            watch.tell(incident, is_left_out=True)

    def _conclude(self, reports: Reports, change: Change | None) -> None:
        """Every rank does this for every round. ``change``: of this rank, if it may take part."""
        self._settle(is_agreement=False)
        rank = self._group.rank
        delays = [self._number - share.number for share in self.shares]
        updates = [
            None if report is None else Update(report.mass, delay, report.is_finite)
            for report, delay in zip(reports, delays, strict=True)
        ]
        verdict = judge(updates, self.sync.max_staleness)
        own = reports[rank]
        if own is not None and not own.is_finite:  # it goes on from what the others have
            self.values.return_to_common()
            change = None
        self.rejected += sum(one.used for place in verdict.rejected if (one := reports[place]) is not None)
        is_there = reports[rank] is not None
        self._begin_exchange(reports, change if is_there else None, verdict.weights)
        numbers = RoundNumbers(self._number, reports, self.plan, verdict, self.rejected, self._flight)
        if is_there:
            self._exposed_s = self._exchange_s = 0.0
        if self._is_together:
            self._settle(is_agreement=True)
        if stopping := [report.stops_for for report in reports if report is not None and report.stops_for]:
            raise NotFinite(stopping[0])
        self._account(reports)
        self._recorder.record(numbers, self.stepping.progress, self.order)
        self._follow(reports, is_there=is_there)

    def _account(self, reports: Reports) -> None:
        """What was computed is done; what a rank has left of its share goes back."""
        assert self.rounds is not None
        done = 0
        for rank, report in enumerate(reports):
            if report is None:
                continue
            _, rest = take(self.shares[rank].ranges, report.used)
            self.left = merged((*rest, *self.left))
            self.shares[rank] = Share()
            done += report.used
            self.rounds.observe(rank, report.used, report.own_s, report.part)
        progress = self.stepping.progress
        progress.cursor += done
        progress.step = self._step_at(progress.cursor)

    def _follow(self, reports: Reports, *, is_there: bool) -> None:
        """What the reports ask for, and the next round."""
        there = [report for report in reports if report is not None]
        stepping = self.stepping
        stepping.stops = stepping.stops or any(report.stops for report in there)
        self._is_leaving = self._is_leaving or any(report.leaves for report in there)
        wants_save = self._is_saving or any(report.saves for report in there)
        # Only a meeting of all ranks leaves one model to save.
        self._saves_now, self._is_saving = wants_save and self._is_together, wants_save and not self._is_together
        if is_there:
            self.wants_checkpoint = False
        self._number += 1
        if stepping.tracer is not None and reports[0] is not None and reports[0].trace_steps:
            stepping.tracer.after_step(stepping.progress.step, reports[0].trace_steps)
        self._assign([not share.ranges for share in self.shares])

    def step_after(self, part: float) -> int:
        """The step that counts when a rank has done so much of its share."""
        progress = self.stepping.progress
        now = self._step_at(progress.cursor)
        ahead = self._step_at(progress.cursor + sum(share.samples for share in self.shares))
        return now + int((ahead - now) * part)

    def _step_at(self, cursor: int) -> int:
        """Steps count global batches, so that they can be compared with those of other ranks and modes."""
        assert self.order is not None
        return self._first_step + -(-cursor // self.order.global_batch)

    # --- the exchange -------------------------------------------------------------------------------------------

    def _begin_exchange(self, reports: Reports, change: Change | None, weights: tuple[float, ...]) -> None:
        there = [report for report in reports if report is not None and report.is_finite]
        sent = None if change is None else change.tensors
        if not any(weights):  # nothing counts: a rejected rank takes over the common values
            if sent is not None:
                self.values.return_to_common()
            return
        largest = max((report.largest for report in there), default=0.0)
        format_ = exchange.Format(largest, frozenset(number for report in there for number in report.exact))
        like = sent if sent is not None else self.values.wide_common()
        self._flight = exchange.Flight(like, format_, sent, self.stepping.clock)
        exchange.begin(self._flight, weights[self._group.rank], self._bulk)

    def _settle(self, *, is_agreement: bool) -> None:
        """Waits for the exchange that is under way, and moves to what came of it."""
        flight, self._flight = self._flight, None
        if flight is None:
            if is_agreement:
                self.values.return_to_common()
            return
        mean = flight.wait()
        self._exposed_s += flight.exposed_s
        self._exchange_s += flight.seconds
        self.values.move(self.outer.update(mean, self.values.names), flight.sent, is_agreement=is_agreement)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        assigned = [one for share in self.shares for one in share.ranges]
        return {
            "left": [list(one) for one in merged((*self.left, *assigned))],
            "momentum": self.outer.state(),
            "rounds": self.rounds.state() if self.rounds is not None else None,
        }

    def close(self) -> None:
        self._bulk = self._flight = None
        self._meeting.close()
