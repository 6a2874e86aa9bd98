"""The members of a run change: the others keep their state, form a new group and go on; one that joins gets it.

Ranks count what they have done together, a step or an exchange between two steps. When a rank is lost, others may
have completed the same thing that it broke: at most one, since nobody can begin the next one alone. Those who have not
get its outcome from one who has, and all are at the same place again.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from ugro.core.errors import UgroError, UsageError
from ugro.train.elastic import state
from ugro.train.elastic.errors import LEFT_BEHIND, LeftBehind, is_lost
from ugro.train.elastic.meeting import Formed, Meeting, Rules
from ugro.train.group import Exchange, Group
from ugro.train.guard import Guard, LossFunction
from ugro.train.sampler import Progress
from ugro.train.stepping import Stepping
from ugro.train.surroundings import Surroundings

log = logging.getLogger("ugro.train")

_START_S = 1800.0  # torch's own limit: ranks may take long to start
_FORM_S = 20.0  # all members wait at the same place: one that does not come is lost
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
        self._is_broken = False  # measurements of the last step were lost, and with them what ranks agreed on
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
        if not state.has_optimizer(self._trainee.kept()):
            # A rank that joins, or is a step behind, gets the others' state: also what their optimizer remembers.
            raise UsageError("an elastic training has to know its optimizer", hint=KEEP_HINT)
        self._group.again = self._exchange
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
        if self.meeting.is_called or self._steps.regroups or self._is_broken:
            self._steps.regroups = False
            self._regroup(At.BOUNDARY)

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
        while True:
            before = asdict(self._trainee.progress)
            try:
                loss = guard.step(loss_fn, batch, scaler)
            except RuntimeError as error:
                if not self._is_lost(error):
                    raise
            else:
                self._position += 1
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
        """The end of a ``with`` block, whose gradients are those of the whole batch: only measurements can be lost."""
        try:
            self._steps.finish()
        except RuntimeError as error:
            if not self._is_lost(error):
                raise
            self._steps.abandon()
            self._steps.count_step()
            self._is_broken = True  # what the script does after the block still needs these gradients
        self._position += 1

    def block_was_interrupted(self, error: BaseException, scaler: Any) -> bool | None:
        """The script goes on behind the block, with gradients that change nothing. True: others had completed the step.

        None: it is an error of the script's own.
        """
        if not self._is_lost(error):
            return None
        self._steps.abandon()
        is_behind = self._interrupted(scaler)
        if not is_behind:
            self._trainee.batch_again(None)
        return is_behind

    def _interrupted(self, scaler: Any) -> bool:
        """True: others had completed the step, and this rank has now what came of it."""
        is_behind = self._regroup(At.STEP)
        if is_behind:
            self._steps.count_step()
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
            if self._regroup(At.EXCHANGE):
                return self._last
        self._position, self._last = self._position + 1, found
        return found

    # --- a new group --------------------------------------------------------------------------------------------

    def _regroup(self, at: At) -> bool:
        """True: this rank was behind, and has the outcome of what it was at."""
        begun = time.monotonic()
        number = self.meeting.number + 1
        while True:
            state.let_go(self._steps)
            self._group.leave()
            formed = self._formed(number, at)
            try:
                return self._enter(formed, at, begun)
            except RuntimeError as error:
                if not is_lost(error):
                    raise
            number = formed.number + 1

    def _formed(self, number: int, at: At) -> Formed:
        try:
            if self.is_joining:
                return self.meeting.join()
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
            "stops": self._steps.stops,
        }  # fmt: skip
        said = [json.loads(one) for one in group.plain_contents(json.dumps(own).encode())]
        source = max(range(len(said)), key=lambda rank: (-1 if said[rank]["joins"] else said[rank]["position"], -rank))
        furthest = said[source]["position"]
        brief = json.loads(group.send(self._brief() if group.rank == source else b"", source))
        is_behind = not self.is_joining and self._position < furthest
        wants = [one["joins"] or (one["position"] < furthest and one["at"] == At.STEP) for one in said]
        if any(wants):
            own_state = (self._steps.model, self._trainee.kept(), self._scaler)
            content = group.send(state.packed(*own_state) if group.rank == source else b"", source)
        group.plain_contents(b"")  # nobody goes on before all have everything
        group.limit(self.meeting.rules.timeout_s)
        if wants[group.rank]:
            kept, is_all = self._trainee.kept(), self.is_joining
            self._scaler_state = state.unpack(content, self._steps.model, kept, is_all=is_all)
        self._is_broken = False
        self._steps.stops = any(one["stops"] for one in said)  # some may not have heard it
        self._adopt(brief, is_behind)
        self._go_on(formed, brief, max(int(one["lead"]) for one in said), begun)
        return is_behind

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
        if self._steps.rewrap is not None:
            self._steps.rewrap()
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


def _restore(progress: Progress, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(progress, name, value)


def _meet_alone(group: Group) -> None:
    from torch import distributed

    group.rank, group.ranks = 0, 1
    group.meet(distributed.HashStore(), _START_S)
