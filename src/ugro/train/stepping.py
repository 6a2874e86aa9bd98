"""The steps of this rank: its share, the times of its parts, and the exchange of measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ugro.kernel.support.errors import UgroError
from ugro.train import failures as finite
from ugro.train.balance import Balance, PartOfShare, Verdict
from ugro.train.failures import Finite, NotFinite, Room, memory_of
from ugro.train.group import Gathering, Group
from ugro.train.parallel.way import Company, Way, distinct
from ugro.train.rules.failures import Incident, OnNan
from ugro.train.samples import Handed, Parts, Progress, Slice
from ugro.train.telemetry import Clock, History, Moments, Tracer, Word, of_units
from ugro.train.trial import Trial

if TYPE_CHECKING:
    from ugro.train.elastic import Elastic


class ApartError(UgroError):
    """Raised when ranks exchange the numbers of different steps."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.add_note(f"hint: {hint}")


class Observer(Protocol):
    def observe(self, words: Sequence[Word], *, repeats: bool) -> None: ...


class Rewrap(Protocol):
    def __call__(self, *, is_static: bool = True, agree: bool = False) -> None:
        """Wraps the model again: for a group with other members, or after a step that failed in its middle.

        ``agree``: on the values of the first rank.
        """


class Stepping:
    exchanges_steps = True

    def __init__(self, group: Group, history: History, balance: Balance, progress: Progress) -> None:
        self.group = group
        self.balance = balance
        self.progress = progress
        self.company = Company(self.now, self.waited)
        self.model: Any = None  # as wrapped; its hook notes when the last gradients are ready
        self.way: Way | None = None  # in which the model is spread over the ranks
        self.slice: Slice | None = None
        self.handed: Handed | None = None  # the batch of this slice
        self.cap: int | None = None  # samples that fit into this device, if known
        self.room = Room(memory_of(group.device))
        self.is_out_of_memory = False
        self.is_asked_to_stop = False
        self.tracer: Tracer | None = None
        self.part: PartOfShare | None = None
        self.trial: Trial | None = None
        self.elastic: Elastic | None = None
        self.rewrap: Rewrap | None = None
        self.exchanges_apart = False  # gradients, by themselves after the backward pass
        self.compression: Observer | None = None  # of gradients
        self.is_backward_foreign = False  # the script, or a library, calls backward in this step
        self.kept: dict[str, Any] = {}  # what the run keeps in checkpoints
        self.begins_with_batch = False  # the script calls run.backward, and we learn of a step when its forward is over
        self.last_weight = 1.0  # of this rank's mean loss in the latest step
        self.stops = False  # all ranks know it, and stop after the same step
        self.regroups = False  # the same: a rank waits to join
        self.finite = Finite(OnNan.IGNORE, history.clock, None)
        self._history = history
        self._has_decided = False  # what becomes of this step
        self._words: list[Word] | None = None  # of all ranks, if they were needed before the end of the step
        self._statistics: list[tuple[Any, str, Any]] = []  # before this step, if it may be left out
        self._hook: Any = None  # before each update
        self._gathering: Gathering | None = None
        self._sent: list[Any] = []  # the futures of the buckets that DDP has sent in this step
        self._sends_zeros = False
        self._said: list[list[float]] | None = None  # by all ranks, when they agreed that their gradients are there
        self._moments: Moments | None = None
        self._early_waits: list[tuple[Any, Any]] = []  # since the last step; they count in the next one
        self._fetching_since: Any = None
        self._fetched: tuple[Any, Any] | None = None
        self._fetched_at: Any = None
        self._is_clean = True

    # --- data ---------------------------------------------------------------------------------------------------

    def fetching(self) -> None:
        self._history.end()
        self._fetching_since = self.now()

    def fetched(self, slice_: Slice, handed: Handed | None = None) -> None:
        self.slice, self.handed = slice_, handed
        if self._fetching_since is not None:
            self._fetched, self._fetching_since = (self._fetching_since, self.now()), None
        self._fetched_at = self.now()
        if self.way is not None:
            self.way.follow()
            if handed is not None and self.way.adds_shares and not self.is_dummy:
                handed.expect_complete()
        self._prepare_forward(is_beginning=self.begins_with_batch)

    def exhausted(self) -> None:
        self.slice = self.handed = None

    def parts(self, batch: Any) -> Parts:
        """What the script wants to compute, which may be moved or taken apart; without a loader, it has one part."""
        return Parts(batch, self.handed)

    def disturb(self) -> None:
        """Excludes the time until the next step from the rank's own time: all ranks did something else."""
        self._is_clean = False

    # --- a step -------------------------------------------------------------------------------------------------

    @property
    def is_hooked(self) -> bool:
        """DDP tells us when the last gradients are ready."""
        is_in_ddp = self.group.is_distributed and hasattr(self.model, "no_sync")
        return is_in_ddp and not self.is_lockstep and not self.exchanges_apart

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
            self.elastic.step_begins()
        self._said = None
        if self.way is not None:
            self.way.expect_unchanged() if self.begins_with_batch else self.way.follow()
        slice_ = self.slice
        step = self.progress.step if slice_ is None else slice_.step
        moments = Moments(step, 0 if slice_ is None else slice_.own, micro_batches)
        moments.fetched, self._fetched = self._fetched, None
        moments.is_clean, self._is_clean = self._is_clean and self._separates_waiting, True
        moments.waits, self._early_waits = self._early_waits, []
        self._moments = self._history.begin(moments)
        self._sent.clear()
        self._words, self._has_decided, self.is_backward_foreign = None, False, False
        self.finite.response = replace(self.finite.response, skips=False)
        if self._hook is None:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            self._hook = register_optimizer_step_pre_hook(self._before_update)
        if not self.begins_with_batch:
            self._prepare_forward(is_beginning=True)
        elif self._fetched_at is not None:
            moments.begun = self._fetched_at
        self._fetched_at, self.last_weight = None, self.weight()
        return self._moments

    def _prepare_forward(self, *, is_beginning: bool) -> None:
        self.company.is_dummy = self.is_dummy
        if not is_beginning:
            return
        if self.trial is not None:
            step = self.progress.step if self.slice is None else self.slice.step
            self.trial.before_step(step, 0 if self.slice is None else self.slice.own)
        self.room.begin()
        if self.finite.choice is OnNan.SKIP and self.model is not None:
            found = finite.statistics(self.model)
            self._statistics = [(module, name, getattr(module, name).clone()) for module, name in found]

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
            moments.is_scaled = scaler is not None and scaler.is_enabled()
        weighted = loss * self.weight(samples, begin)
        (weighted if scaler is None else scaler.scale(weighted)).backward()
        self.backward_done()

    def backward_done(self) -> None:
        if self._moments is None:
            return
        if self._gathering is None and not self.is_hooked:
            self.finite.take(self._moments, self._parameters)
            self._moments.ready = self._history.clock.now()
        if self._moments.ready is not None:
            self._moments.synced = self._history.clock.now()

    @property
    def clock(self) -> Clock:
        return self._history.clock

    @property
    def _parameters(self) -> Any:
        return () if self.model is None else self.model.parameters()

    def now(self) -> Any:
        return self._history.clock.now()

    def waited(self, since: Any) -> None:
        """This rank waited for others since then, and did not compute."""
        waits = self._early_waits if self._moments is None else self._moments.waits
        waits.append((since, self.now()))

    def paused(self, spans: Sequence[tuple[Any, Any]]) -> None:
        """In these spans all ranks did something else."""
        if self._moments is not None:
            self._moments.pauses += spans

    def bucket(self, bucket: Any, reduce: Any) -> Any:
        """DDP's hook, called with a bucket of gradients, in the same order on all ranks."""
        is_last = self._moments is not None and bucket.is_last()
        if self._moments is not None:
            self.finite.add(self._moments, bucket.buffer())
        if is_last:
            assert self._moments is not None
            self.finite.seal(self._moments)
            self._moments.ready = self._history.clock.now()
        future = reduce(None, bucket)
        if self._moments is not None:
            self._sent.append(future)
        if is_last and self.elastic is None:
            self._tell(self._moments)
        elif is_last and not self._sends_zeros:
            _at_end_of_backward(partial(self._agree, self._moments))
        return future

    @property
    def is_under_way(self) -> bool:
        """A step has begun, and is not over."""
        return self._moments is not None

    @property
    def has_reported(self) -> bool:
        """The other ranks learn from this rank's word how its step was; it cannot be taken back."""
        return self._gathering is not None or self._said is not None

    def send_zeros(self) -> None:
        """Sends zeros in those exchanges of DDP in this step that the other ranks still wait for."""
        model = self.model
        self._sends_zeros = True
        for bucket in model.reducer._get_zeros_like_grad_buckets()[len(self._sent) :]:
            model.reducer._run_comm_hook(bucket)
        if model.find_unused_parameters and not model.static_graph:
            model.process_group.allreduce([model.reducer._get_local_used_map()]).wait()
        for future in self._sent:
            future.wait()  # DDP's buffers may go after that
        self._sends_zeros = False

    def _tell(self, moments: Moments | None) -> None:
        if self.elastic is None:
            self._gathering = self.group.gather(self._word(moments).numbers())
        else:
            self._agree(moments)

    def _agree(self, moments: Moments | None) -> None:
        """Returns when the gradients are on the devices of all ranks and all know it: before an optimizer can run."""
        assert self.elastic is not None
        for future in self._sent:
            future.wait()
        self._said = self.elastic.agreed(self._history.clock, self._word(moments).numbers())

    def _word(self, moments: Moments | None) -> Word:
        word = self._history.word(
            stops=self.is_asked_to_stop,
            is_out_of_memory=self.is_out_of_memory,
            cap=self.cap,
            trace_steps=self.tracer.asked() if self.tracer is not None else 0,
            part=self.part.asked() if self.part is not None else 1.0,
        )
        if (estimate := self._estimated_cap(moments)) is not None:
            word = replace(word, cap=estimate, is_cap_estimated=True)
        if self.elastic is not None and self.elastic.meeting.has_joiners:
            word = replace(word, regroups=True)
        return self.complete(word)

    def _estimated_cap(self, moments: Moments | None) -> int | None:
        """Returns how many samples this device should hold at once, if less than the batch and not found out yet."""
        balancer = self.balance.balancer
        if balancer is None or self.cap is not None:
            return None
        if moments is not None and not self.is_out_of_memory:
            self.room.end(-(-moments.share // moments.micro_batches))
        found = self.room.cap(balancer.batch.granule)
        return None if found is None or found >= balancer.batch.total else found

    def complete(self, word: Word) -> Word:
        """With where this rank is, and what is wrong there."""
        slice_, seen = self.slice, self._history.latest
        word = replace(word, position=(self.progress.epoch, self.progress.step if slice_ is None else slice_.step))
        if not self.finite.sees_now:
            seen = self._history.before_latest
        wrong = None if word.is_out_of_memory else self.finite.wrong(seen)
        if wrong is None or seen is None:
            return word
        return replace(word, not_finite=wrong[0], is_harmless=wrong[1], wrong_step=seen.step)

    def finish(self) -> Verdict:
        """Called once per step on every rank, when all ranks have the same measurements."""
        self._note_foreign_backward(self._moments)
        moments, self._moments = self._moments, None
        if self.way is not None:
            self.way.expect_unchanged()
        if not self.has_reported:
            if moments is None or (moments.ready is None and not self.is_out_of_memory):
                return Verdict(stops=False, repeats=False)  # there was no backward
            self._tell(moments)
        if moments is not None and moments.synced is None:  # another library called backward
            moments.synced = self._history.clock.now()
            moments.ready = moments.synced if moments.ready is None else moments.ready
        if self._words is None:
            self._words = _read(self._heard())
        self._gathering = self._said = None
        return self.conclude(of_units(self._words, self.units))

    def _heard(self) -> list[list[float]]:
        """Returns what all ranks have told about this step."""
        if self._said is not None:
            return self._said
        assert self._gathering is not None
        return self._gathered(self._gathering)

    def exchanged(self, word: Word) -> list[Word]:
        """The words of all ranks."""
        return _read(self.group.gather(self.complete(word).numbers()).wait())

    # --- numbers that are not finite ----------------------------------------------------------------------------

    def _decide(self, words: list[Word]) -> None:
        """What becomes of this step, the same on all ranks. Raises NotFinite if the run ends."""
        self._has_decided = True
        found = [
            Incident(self._called(unit, len(words)), word.wrong_step, word.not_finite, word.is_harmless)
            for unit, word in enumerate(words)
            if word.not_finite is not None
        ]
        self.finite.decide(found or self.finite.spoilt(self._history.latest, self._parameters), len(words))
        if self.finite.response.skips:
            self._leave_out()

    def _leave_out(self) -> None:
        """Also of statistics, such as those of a BatchNorm, which forward has changed already."""
        for parameter in self._parameters:
            parameter.grad = None
        for module, name, before in self._statistics:
            getattr(module, name).copy_(before)

    def _called(self, unit: int, units: int) -> str:
        own = f"rank {unit} ({distinct(self.group.nodes)[unit]})"
        return own if units == self.group.ranks else self.balance.names[unit]

    def _before_update(self, optimizer: Any, args: Any, options: Any) -> None:
        """The update of a step in which some rank found numbers that are not finite changes nothing."""
        if self._moments is None:  # it is over: there are no gradients, if it is to change nothing
            return
        is_alone = self.group.ranks == 1 or not self.exchanges_steps
        looks_at_own = is_alone and self._moments.ready is None  # the script has called backward itself
        if not looks_at_own and self.finite.choice is not OnNan.SKIP:
            return
        own = {id(one) for one in self._parameters}
        if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            return
        if looks_at_own:
            self.backward_done()
        if self.finite.choice is not OnNan.SKIP:
            return
        if not self._has_decided:
            self._hear_early(self._moments)
        elif self.finite.response.skips:
            self._leave_out()

    def _note_foreign_backward(self, moments: Moments | None) -> None:
        """Where the model is not in DDP, which would have told."""
        if self.is_backward_foreign and moments is not None and moments.ready is None:
            self.backward_done()

    def _hear_early(self, moments: Moments) -> None:
        self._note_foreign_backward(moments)
        if not self.has_reported:
            if moments.ready is None:
                return  # there was no backward
            self._tell(moments)
        self._words = _read(self._heard())
        words = of_units(self._words, self.units)
        if not any(word.is_out_of_memory for word in words):
            self._decide(words)

    def expect_finite(self) -> None:
        """Raises NotFinite on all ranks before a checkpoint would have parameters that are not. All ranks call it."""
        checks = self.finite.choice is not OnNan.IGNORE
        is_wrong = checks and not finite.are_finite(one for one in self._parameters if one.requires_grad)
        found = [place for place, (one,) in enumerate(self.group.numbers([float(is_wrong)])) if one]
        if found:
            name = self._called(found[0], self.group.ranks)
            raise NotFinite(f"the parameters of {name} are not finite after step {self.progress.step}")

    def look_at_last(self) -> None:
        latest = self._history.latest
        self._history.forget()
        self.finite.look_at_last(latest, self._called(self.group.rank, self.group.ranks))

    def conclude(self, words: list[Word]) -> Verdict:
        """All ranks have the same words about this step."""
        self._moments = None
        self._sent.clear()
        step = self.progress.step if self.slice is None else self.slice.step
        if not self._has_decided and not any(word.is_out_of_memory for word in words):
            self._decide(words)
        verdict = self.balance.digest(words, step, self.progress.epoch)
        self.stops, self.regroups = self.stops or verdict.stops, self.regroups or verdict.regroups
        if self.compression is not None:
            self.compression.observe(words, repeats=verdict.repeats or self.finite.response.skips)
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

    def mean(self, loss: float) -> float:
        """Over the samples of all ranks, from each rank's mean in the latest step. All ranks call it."""
        since = self.now()
        found = self.group.numbers([loss * self.last_weight if self.last_weight else 0.0])
        self.waited(since)
        return math.fsum(one for (one,) in found) / self.group.ranks

    def abandon(self) -> Any:
        """A step that came to nothing; returns the loss of this rank's share, or NaN if it was not computed."""
        self._gathering = self._moments = self._said = self._words = None
        self._sent.clear()
        self._sends_zeros = False
        self.is_out_of_memory = False
        self._is_clean = False
        loss = self._history.forget()
        return math.nan if loss is None else loss

    def expect_together(self) -> None:
        """All ranks do something else now, between the same two steps."""
        self.disturb()

    def average(self, parameters: Any, *, is_repeated: bool = True) -> None:
        """Averages gradients that each rank has computed by itself. As with DDP, what no rank has used gets none.

        Those of a step that ``is_repeated`` are looked at again: its words were about other gradients.
        """
        own = bytes(one.grad is not None for one in parameters)
        used = [any(flags) for flags in zip(*self.group.plain_contents(own), strict=True)]
        wrong = self._asked_again(parameters) if is_repeated else None
        self.group.average([one for one, is_used in zip(parameters, used, strict=True) if is_used])
        if self.elastic is not None:
            self.elastic.agreed(self._history.clock, [])
        if wrong is not None:
            self._decide(wrong)

    def judge_repeated(self) -> None:
        """A step was done again, after its words were exchanged."""
        self._decide(self._asked_again(self._parameters))

    def _asked_again(self, parameters: Any) -> list[Word]:
        latest = self._history.latest
        if latest is None:
            return []
        self.finite.take(latest, parameters)
        latest.ready = self.now()
        wrong = self.finite.wrong(latest, waits=True)
        own = Word(wrong_step=latest.step)
        if wrong is not None:
            own = replace(own, not_finite=wrong[0], is_harmless=wrong[1])
        return of_units([Word.of(one) for one in self.group.gather(own.numbers()).wait()], self.units)

    def _gathered(self, gathering: Gathering) -> list[list[float]]:
        if not self.is_lockstep:
            return gathering.wait()
        since = self.now()
        numbers = gathering.wait()
        self.waited(since)  # it was sent after the optimizer, which takes some ranks longer than others
        return numbers

    def close(self) -> None:
        self.look_at_last()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.way is not None:
            self.way.close()
        self.group.close()

    def _trace(self, step: int, asked: int) -> None:
        if self.tracer is not None and self.tracer.after_step(step, asked):
            self.disturb()


def _at_end_of_backward(then: Callable[[], None]) -> None:
    """Called from within it. What ``then`` raises, ``backward`` raises."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(then)


def _read(numbers: list[list[float]]) -> list[Word]:
    """Raises if the ranks are not in the same step: what they have just exchanged does not belong together."""
    words = [Word.of(one) for one in numbers]
    if len({word.position for word in words}) > 1:
        there = [f"rank {rank} in {_place(word.position, words)}" for rank, word in enumerate(words)]
        raise ApartError(
            f"the ranks are not in the same step: {', '.join(there)}",
            hint="a rank has left its loop early, or left out a batch: all ranks must do so in the same step",
        )
    return words


def _place(position: tuple[int, int], words: Sequence[Word]) -> str:
    epoch, step = position
    is_same_epoch = all(word.position[0] == epoch for word in words)
    return f"step {step}" if is_same_epoch else f"step {step} of epoch {epoch}"
