"""The members of a run change: the others keep their state, form a new group and go on; one that joins gets it.

Ranks count what they have done together, a step or an exchange between two steps. A rank counts a step, and lets the
optimizer run, when every rank has told it that its device has all gradients. Else it has changed nothing, and does the
step again.

When a rank is lost, others may have completed the same thing that it broke: at most one, since nobody can begin the
next one alone. Those who have not get its outcome from one who has, and all are at the same place again. If all who
have are lost, it is done again by those who are left.
"""

from __future__ import annotations

import io
import json
import logging
import math
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from ugro.kernel.support.errors import UgroError, UsageError
from ugro.kernel.support.quantities import format_size
from ugro.train import saving as state
from ugro.train.elastic_meeting import LEFT_BEHIND, Formed, LeftBehind, Meeting, Rules, is_lost
from ugro.train.group import Arrival, Content, Exchange, Group
from ugro.train.samples import Progress, Slice
from ugro.train.step import Guard, LossFunction
from ugro.train.stepping import Stepping
from ugro.train.surroundings import Surroundings
from ugro.train.telemetry import Clock

log = logging.getLogger("ugro.train")

_START_S = 1800.0  # torch's own limit: ranks may take long to start
_FORM_S = 20.0  # all members wait at the same place: one that does not come is lost
_MOST_FAILURES = 3  # of a rank that joins: then the others go on without it
_SAY_S = 10.0
_LOOK_S = 0.0002  # at the device, while it exchanges
_ROUND_S = 0.2  # the others are asked so often, which shows who is lost
KEEP_HINT = "call run.keep(model=…, optimizer=…) and run.loader(…) before run.epochs(…)"


class At(StrEnum):
    """Where a rank noticed it."""

    STEP = "step"
    EXCHANGE = "exchange"  # such as run.gather or run.checkpoint
    BOUNDARY = "boundary"  # between two steps


@dataclass(frozen=True, slots=True)
class Change:
    """What all members know of a new group."""

    formed: Formed
    names: tuple[str, ...]
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    lead: int
    seconds: float


class Saying:
    """What takes long is said, at first after a while, and not too often."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def now_and_then(self, text: str) -> None:
        if time.monotonic() - self._said_at > _SAY_S:
            self._said_at = time.monotonic()
            log.warning("%s", text)


class Trainee(Protocol):
    """What a run does for it."""

    progress: Progress

    def kept(self) -> dict[str, Any]: ...
    def lead(self) -> int: ...
    def knowledge(self) -> dict[str, Any] | None: ...
    def regrouped(self, change: Change, knowledge: dict[str, Any] | None) -> None: ...
    def batch_again(self, batch: Any) -> Any: ...


class Elastic:
    def __init__(self, meeting: Meeting, group: Group) -> None:
        self.meeting = meeting
        self.is_joining = meeting.joins
        self._group = group
        self._run: Trainee | None = None
        self._stepping: Stepping | None = None
        self._names: dict[int, str] = {}
        self._position = 0
        self._last: list[bytes] = []  # the outcome of the last exchange
        self._is_counted = True  # the last step: from then on it is not done again
        self._is_applied = True  # an optimizer has run since
        self._has_gradients = False  # of a step that others have completed, and not applied yet
        self._outdated: Slice | None = None  # a batch that the script has got before others were lost
        self._scaler: Any = None  # the script's
        self._scaler_state: dict[str, Any] | None = None  # of the others, for the next step

    @classmethod
    def of(cls, surroundings: Surroundings, device: Any) -> tuple[Elastic | None, Group, Surroundings]:
        """The group that this rank begins in: that of all ranks, or its own until the others take it in."""
        if surroundings.min_ranks is None or surroundings.trial is not None:
            group = Group(surroundings, device)
            return None, group, replace(surroundings, rank=group.rank, ranks=group.ranks)
        if surroundings.meeting is None:
            raise UsageError("UGRO_MIN_RANKS is set, but not MASTER_ADDR and MASTER_PORT")
        rules = Rules(surroundings.min_ranks, surroundings.rank_timeout_s)
        meeting = Meeting(*surroundings.meeting, surroundings.rank, rules)
        group = Group(surroundings, device, is_elastic=True)
        if meeting.joins:
            _meet_alone(group)
        else:
            group.meet(meeting.connected("group/0"), _START_S)
            meeting.members = frozenset(range(group.ranks))
        group.nodes = tuple(group.texts(surroundings.node))
        if meeting.joins:  # it gets everything from the others
            surroundings = replace(surroundings, resume=None, speeds=())
        return cls(meeting, group), group, surroundings

    def begin(self, run: Trainee, stepping: Stepping, names: list[str]) -> None:
        self._run, self._stepping = run, stepping
        self._names = dict(enumerate(names))
        stepping.elastic = self

    def check(self, parallel: str) -> None:
        if parallel != "ddp":
            raise UsageError(
                f"an elastic job cannot spread its model with {parallel!r}: each rank must have all of it",
                hint="leave out elastic.min_ranks, or parallel=",
            )

    def arm(self, *, may_join: bool) -> None:
        """From here on a lost rank is no error. One that joins waits here until the others take it in."""
        if self._group.again is not None:
            return
        if self.is_joining and not may_join:
            raise UsageError("a rank can join a training only in run.epochs(…)", hint=KEEP_HINT)
        if not state.optimizers(self._trainee.kept()):
            # A rank that joins, or is a step behind, gets the others' state: also what their optimizer remembers.
            raise UsageError("an elastic training has to know its optimizer", hint=KEEP_HINT)
        self._group.again = self._exchange
        for optimizer in state.optimizers(self._trainee.kept()):
            optimizer.register_step_pre_hook(lambda *_: self._update_begins())
        if self.is_joining:
            self._regroup(At.BOUNDARY)
        else:
            self._group.limit(self.meeting.rules.timeout_s)
            state.note_members(Formed(0, ()), sorted(self.meeting.members))
        self.meeting.listen()

    @property
    def _trainee(self) -> Trainee:
        assert self._run is not None
        return self._run

    @property
    def _steps(self) -> Stepping:
        assert self._stepping is not None
        return self._stepping

    # --- what ranks do together ---------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Between two steps, the same two on all ranks."""
        self.meeting.spoke()
        if self.meeting.is_called or self._steps.regroups:
            self._steps.regroups = False
            self._regroup(At.BOUNDARY)
        if self._group.again is not None and not self._is_current:
            self._exchange(self._follow)

    def _follow(self) -> list[bytes]:
        """Layers were frozen or thawed, on all ranks."""
        if self._steps.way is not None:
            self._steps.way.follow()
        return []

    def heed(self, scaler: Any) -> None:
        """Before it scales a loss: ranks scale alike, also one that joins, or whose last step was left out."""
        if scaler is not None:
            self._scaler = scaler
            found, self._scaler_state = self._scaler_state, None
            if found:
                scaler.load_state_dict(found)

    def step(self, guard: Guard, loss_fn: LossFunction, batch: Any, scaler: Any) -> Any:
        """A step that is done again by those who are left, on the same samples."""
        self.arm(may_join=False)
        self.heed(scaler)
        if self._is_outdated:
            self._outdated, again = None, self._trainee.batch_again(batch)
            if again is None:
                state.void_gradients(self._steps.model, scaler)
                return math.nan
            batch = again
        while True:
            before = asdict(self._trainee.progress)
            try:
                loss = guard.step(loss_fn, batch, scaler)
            except RuntimeError as error:
                if not self._is_lost(error):
                    raise
            else:
                self._count()
                return loss
            loss = self._steps.abandon()
            _restore(self._trainee.progress, before)
            if self._interrupted(scaler):
                return loss
            again = self._trainee.batch_again(batch)
            if again is None:
                return loss
            batch = again

    def block_is_over(self) -> None:
        self._steps.finish()
        self._count()

    def block_was_interrupted(self, error: BaseException, scaler: Any) -> bool | None:
        """The script goes on behind the block, with gradients that change nothing. True: others had completed the step.

        None: it is an error of the script's own.
        """
        if not self._is_lost(error):
            return None
        if self._is_counted:
            raise UgroError(
                "a rank was lost in a step in which an optimizer had run already: it cannot be done again",
                hint="call optimizers after the last backward of a block, and none of torch.distributed after them; "
                "the job is tried again from its last checkpoint",
            ) from error
        self._steps.abandon()
        is_behind = self._interrupted(scaler)
        if not is_behind:
            self._trainee.batch_again(None)
        return is_behind

    # --- when a step counts -------------------------------------------------------------------------------------

    @property
    def _is_outdated(self) -> bool:
        """The batch that the script has is a share beside others whose ranks are lost, and its step is ahead."""
        return self._outdated is not None and self._outdated is self._steps.slice

    def step_begins(self) -> None:
        self.meeting.spoke()
        if self._is_outdated:
            raise UgroError(
                "a rank was lost between a batch and its step, which would lack its samples",
                hint="call run.gather, run.texts and run.checkpoint after the step; run.step(loss_fn, batch) gets the "
                "batch again; the job is tried again from its last checkpoint",
            )
        self._is_counted = self._is_applied = False

    def agreed(self, clock: Clock, words: list[float]) -> list[list[float]]:
        """Returns the words of all ranks, when their devices have what they exchanged, and all ranks know it.

        A rank that is lost meanwhile breaks the next round, whatever a device still waits for.
        """
        arrival = self._group.arrival(clock)
        begun = time.monotonic()
        while True:
            said = self._group.gather([float(_comes(arrival)), *words]).wait()
            if all(is_there for is_there, *_ in said):
                return [own for _, *own in said]
            limit_s = self.meeting.rules.timeout_s
            if time.monotonic() - begun > limit_s:
                waiting = [name for name, (is_there, *_) in zip(self._group.nodes, said, strict=True) if not is_there]
                raise UgroError(
                    f"the gradients were not exchanged within {limit_s:.0f} s: {', '.join(waiting)} waits for them",
                    hint="elastic.timeout (--rank-timeout) must be longer than an exchange takes; or a GPU hangs",
                )

    def _count(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._position += 1

    def _update_begins(self) -> None:
        """An optimizer is about to run: it does so only after the last backward has returned, with ``agreed``."""
        if self._steps.is_under_way:
            self._count()
        self._is_applied = True

    def _interrupted(self, scaler: Any) -> bool:
        """True: others had completed the step, and this rank has now what came of it."""
        is_behind = self._regroup(At.STEP)
        if is_behind:
            self._steps.count_step()
        if not self._has_gradients:
            state.void_gradients(self._steps.model, scaler)
        return is_behind

    def _is_lost(self, error: BaseException) -> bool:
        """An error of its own comes again when the step is done again; then nobody has called."""
        return is_lost(error) or (isinstance(error, RuntimeError) and self.meeting.is_called)

    def _exchange(self, operation: Exchange) -> list[bytes]:
        self.meeting.spoke()
        while True:
            try:
                found = operation()
                break
            except RuntimeError as error:
                if not self._is_lost(error):
                    raise
            is_behind = self._regroup(At.EXCHANGE)
            slice_ = self._steps.slice
            if slice_ is not None and self._trainee.progress.step == slice_.step:
                self._outdated = slice_
            if is_behind:
                return self._last
        self._position, self._last = self._position + 1, found
        return found

    # --- a new group --------------------------------------------------------------------------------------------

    def _regroup(self, at: At) -> bool:
        """True: this rank was behind, and has the outcome of what it was at."""
        begun = time.monotonic()
        number = self.meeting.number + 1
        failures = 0
        while True:
            state.let_go(self._steps, keeps_gradients=self._must_apply(at))
            self._group.leave()
            formed = self._formed(number, at)
            try:
                return self._enter(formed, at, begun)
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                failures += 1
                log.warning("the group broke while it was formed, and is formed again: %s", error)
            if self.is_joining and failures == _MOST_FAILURES:
                log.error("rank %d gives up to join: %d groups broke with it", self.meeting.rank, failures)
                raise SystemExit(LEFT_BEHIND)
            number = formed.number + 1

    def _must_apply(self, at: At) -> bool:
        """The script exchanges something between a step and its optimizer, such as the loss."""
        return at is At.EXCHANGE and self._is_counted and not self._is_applied

    def _formed(self, number: int, at: At) -> Formed:
        try:
            if self.is_joining:
                return self.meeting.join(number)
            return self.meeting.form(number, takes=at is not At.EXCHANGE)
        except LeftBehind as error:
            log.error("%s", error)
            raise SystemExit(LEFT_BEHIND) from error
        except RuntimeError as error:
            raise UgroError(
                "the place where ranks meet is gone: the node of rank 0 is lost, or its store was ended",
                hint="the job is tried again from its last checkpoint, if its job file allows retries",
            ) from error

    def _enter(self, formed: Formed, at: At, begun: float) -> bool:
        group = self._group
        group.rank, group.ranks = formed.ranks.index(self.meeting.rank), len(formed.members)
        group.meet(self.meeting.connected(f"group/{formed.number}"), _FORM_S)
        own = {
            "position": self._position, "joins": self.is_joining, "at": at, "lead": self._trainee.lead(),
            "stops": self._steps.stops, "must_apply": self._must_apply(at), "is_current": self._is_current,
        }  # fmt: skip
        said = [json.loads(one) for one in group.plain_contents(json.dumps(own).encode())]
        source = max(range(len(said)), key=lambda rank: (-1 if said[rank]["joins"] else said[rank]["position"], -rank))
        furthest = said[source]["position"]
        brief = json.loads(bytes(group.send(self._brief() if group.rank == source else b"", source)))
        is_behind = not self.is_joining and self._position < furthest
        wants = [one["joins"] or (one["position"] < furthest and one["at"] == At.STEP) for one in said]
        has_gradients = any(wants) and bool(said[source]["must_apply"])
        content: Content = self._sent(formed, source, has_gradients) if any(wants) else b""
        group.plain_contents(b"")  # nobody goes on before all have everything
        if any(wants):
            self._take_over(content if wants[group.rank] else None, formed)
        group.limit(self.meeting.rules.timeout_s)
        self._has_gradients = is_behind and has_gradients
        if is_behind:
            self._is_counted, self._is_applied = True, not has_gradients
        self._steps.stops = any(one["stops"] for one in said)  # some may not have heard it
        self._adopt(brief, is_behind)
        self._wrap_again(agrees=not all(one["is_current"] for one in said))
        self._go_on(formed, brief, max(int(one["lead"]) for one in said), begun)
        return is_behind

    @property
    def _is_current(self) -> bool:
        """The ranks have exchanged gradients of what is trained now."""
        return self._steps.way is None or self._steps.way.is_current()

    def _wrap_again(self, *, agrees: bool) -> None:
        """``agrees``: on the values of layers that have thawed since the last step."""
        if self._steps.rewrap is not None:
            self._steps.rewrap(agree=agrees)
        if self._steps.way is not None:
            self._steps.way.settle()

    def _sent(self, formed: Formed, source: int, with_gradients: bool) -> Content:
        """The state of one rank. To pack and to send much of it takes long: the others hear that it goes on."""
        group, file, saying = self._group, io.BytesIO(), Saying()
        name = f"rank {formed.ranks[source]}"

        def pack() -> None:
            if group.rank == source:
                model, kept = self._steps.model, self._trainee.kept()
                state.pack(file, model, kept, self._scaler, with_gradients=with_gradients)

        def reached(said: list[list[float]]) -> None:
            saying.now_and_then(f"{name} packs its state: {format_size(int(said[source][1]))} so far")

        def sent(done: int, size: int) -> None:
            saying.now_and_then(f"the state of {name} is sent: {format_size(done)} of {format_size(size)}")

        group.while_others_wait(pack, lambda: self._works(file.tell()), reached)
        return group.send(file.getbuffer(), source, sent)

    def _take_over(self, content: Content | None, formed: Formed) -> None:
        """``content``: for this rank; none: for others."""
        saying = Saying()

        def unpack() -> None:
            if content is not None:
                kept, is_all = self._trainee.kept(), self.is_joining
                self._scaler_state = state.unpack(content, self._steps.model, kept, is_all=is_all)

        def report(said: list[list[float]]) -> None:
            left = [f"rank {rank}" for rank, (is_done, _) in zip(formed.ranks, said, strict=True) if not is_done]
            saying.now_and_then(f"{', '.join(left)} takes over the state")

        try:
            self._group.while_others_wait(unpack, self._works, report)
        except RuntimeError as error:  # this rank has what it needs: the next exchange shows who is lost
            if not is_lost(error):
                raise

    def _works(self, reached: float = 0.0) -> float:
        self.meeting.spoke()
        return float(reached)

    def _brief(self) -> bytes:
        return json.dumps(
            {
                "position": self._position,
                "last": [one.hex() for one in self._last],
                "progress": asdict(self._trainee.progress),
                "names": list(self._names.items()),
                "members": sorted(self.meeting.members),
                "knowledge": self._trainee.knowledge(),
            }
        ).encode()

    def _adopt(self, brief: dict[str, Any], is_behind: bool) -> None:
        if self.is_joining:
            _restore(self._trainee.progress, brief["progress"])
            self._names = {int(rank): str(name) for rank, name in brief["names"]}
        if self.is_joining or is_behind:
            self._position, self._last = brief["position"], [bytes.fromhex(one) for one in brief["last"]]

    def _go_on(self, formed: Formed, brief: dict[str, Any], lead: int, begun: float) -> None:
        before = frozenset(brief["members"])
        now = frozenset(formed.ranks)
        joined = {member.rank for member in formed.members if member.joins}
        change = Change(
            formed,
            tuple(self._names[rank] for rank in formed.ranks),
            tuple(f"rank {rank} ({self._names[rank]})" for rank in sorted(before - now)),
            tuple(f"rank {rank} ({self._names[rank]})" for rank in sorted(joined)),
            lead,
            time.monotonic() - begun,
        )
        was_joining, self.is_joining = self.is_joining, False
        self._trainee.regrouped(change, brief["knowledge"])
        self._steps.regroups = False
        self.meeting.joined(formed)
        state.note_members(formed, list(formed.ranks))
        if was_joining:
            state.seed_apart(self._trainee.progress.seed, self.meeting.rank, formed.number)
        log.warning("%s", summary(change, self._trainee.progress.step))


def summary(change: Change, step: int) -> str:
    """In words, for the log of each rank."""
    parts = []
    if change.lost:
        parts.append(f"lost {', '.join(change.lost)}")
    if change.joined:
        parts.append(f"{', '.join(change.joined)} joined")
    what = "; ".join(parts) or "the group was formed again"
    count = len(change.names)
    ranks = f"{count} rank{'s' * (count != 1)}"
    return f"{what}; training goes on with {ranks} at step {step}, after {change.seconds:.1f} s"


def _comes(arrival: Arrival | None) -> bool:
    """Whether it is there, after a while."""
    if arrival is None:
        return True
    limit = time.monotonic() + _ROUND_S
    while not arrival.is_there():
        if time.monotonic() > limit:
            return False
        time.sleep(_LOOK_S)
    return True


def _restore(progress: Progress, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(progress, name, value)


def _meet_alone(group: Group) -> None:
    from torch import distributed

    group.rank, group.ranks = 0, 1
    group.meet(distributed.HashStore(), _START_S)
