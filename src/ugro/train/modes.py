"""What a run does differently with local SGD."""

from __future__ import annotations

import atexit
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ugro.kernel.support.errors import UgroError, UsageError
from ugro.train.balance import Balance
from ugro.train.elastic import KEEP_HINT, Change
from ugro.train.loader import Course, Loader, torchs
from ugro.train.local_course import LocalCourse, LocalStepping, Share
from ugro.train.local_exchange import Recorder, Values, spread
from ugro.train.parallel.way import Way
from ugro.train.reporting import Metrics
from ugro.train.rules.balance import Balancer, Batch
from ugro.train.rules.shares import Mode
from ugro.train.rules.sync import Rounds, Sync, Wish, batches
from ugro.train.samples import Handed, Order, Progress, Schedule, Slice, Weights
from ugro.train.stepping import Stepping

# --- trainee ----------------------------------------------------------------------------------------------------------
# What changes in a run when its members do: names, shares, what is loaded ahead, and who writes for all.


@dataclass(slots=True)
class ElasticRun:
    progress: Progress
    objects: dict[str, Any]
    stepping: Stepping
    balance: Balance
    metrics: Metrics
    mode: Mode
    speeds: tuple[float, ...]  # of all ranks of the job, if known
    introduce: Callable[[list[str]], None]  # records which ranks there are
    least: int = 1  # samples of a rank
    loader: Loader | None = None
    _known: dict[str, Any] | None = None  # what was learnt of ranks, also of those that are gone

    def kept(self) -> dict[str, Any]:
        return self.objects

    def lead(self) -> int:
        """Batches that are loaded ahead."""
        return 0 if self.balance.schedule is None else self.balance.schedule.lead

    def knowledge(self) -> dict[str, Any] | None:
        """Of the ranks, to plan with; the same on all of them, and all plan the same."""
        balancer = self.balance.balancer
        if balancer is None:
            return None
        self._known = {**(self._known or {}), **balancer.known()}
        batch = balancer.batch
        return {
            "known": self._known,
            "total": batch.total,
            "granule": batch.granule,
            "least": self.least,
            "can_accumulate": balancer.can_accumulate,
        }

    def regrouped(self, change: Change, knowledge: dict[str, Any] | None) -> None:
        rank, step = self.stepping.group.rank, self.progress.step
        self.stepping.group.nodes = change.names
        if self.stepping.way is not None:
            self.stepping.way.units = tuple(range(len(change.names)))
        self.balance.regroup(change.names, self.metrics if rank == 0 else None, step)
        if rank == 0:
            self._record(change)
            atexit.register(self.balance.close)  # before the writer's, which the record has registered
        if knowledge is None:
            return
        if self.loader is None:
            raise UsageError("a rank that joins has no loader yet", hint=KEEP_HINT)
        self._known = knowledge["known"]
        self._share_anew(change, knowledge)

    def _share_anew(self, change: Change, knowledge: dict[str, Any]) -> None:
        assert self.loader is not None
        ranks, total = change.formed.ranks, int(knowledge["total"])
        least = min(int(knowledge["least"]), total // len(ranks))
        batch = Batch(total, change.names, least, int(knowledge["granule"]))
        speeds = tuple(self.speeds[rank] for rank in ranks) if self.speeds else ()
        balancer = Balancer(batch, self.mode, speeds, can_accumulate=bool(knowledge["can_accumulate"]))
        balancer.recall(knowledge["known"])
        schedule = Schedule(balancer.plan, change.lead)
        self.balance.begin(balancer, schedule)
        self.loader.regroup(self.stepping.group.rank, schedule)

    def batch_again(self, batch: Any) -> Any:
        return None if self.loader is None else self.loader.again(batch)

    def _record(self, change: Change) -> None:
        self.introduce(list(change.names))
        self.metrics.put(
            {
                "kind": "members",
                "step": self.progress.step,
                "number": change.formed.number,
                "ranks": list(change.formed.ranks),
                "nodes": list(change.names),
                "lost": list(change.lost),
                "joined": list(change.joined),
                "seconds": round(change.seconds, 3),
            }
        )


# --- loader -----------------------------------------------------------------------------------------------------------
# The batches of a rank's own steps, round by round.


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


# --- mode -------------------------------------------------------------------------------------------------------------


class LocalWay(Way):
    """Every rank has a complete model, and steps exchange nothing."""

    def __init__(self, model: Any, course: LocalCourse) -> None:
        super().__init__(model, course.stepping.group)
        self._course = course

    @property
    def adds_shares(self) -> bool:
        return False

    def change(self, *, has_thawed: bool) -> None:
        if has_thawed and not self._course.values.has(self.trained()):
            raise UsageError(
                "layers were thawed in the middle of an epoch: with local SGD, ranks are in different steps then",
                hint="thaw them before an epoch's batches, on all ranks",
            )

    def close(self) -> None:
        self._course.close()


class LocalMode:
    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._course: LocalCourse | None = None

    @classmethod
    def of(cls, sync: Sync, ranks: int, resumed: Mapping[str, Any] | None, is_elastic: bool) -> LocalMode | None:
        """None: ranks exchange gradients in every step, or there is only one, with no rest of others' rounds."""
        if not sync.is_local:
            return None
        if is_elastic:
            raise UsageError(
                "an elastic job cannot train with local SGD", hint="leave out elastic.min_ranks, or train_sync: local"
            )
        return cls(sync) if ranks > 1 or has_holes(resumed) else None

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples of each rank in this round."""
        return () if self._course is None else self._course.plan.shares

    def check(self, parallel: str, *, sync_batchnorm: bool) -> None:
        if parallel != "ddp":
            raise UsageError(
                f"local SGD cannot spread a model with {parallel!r}: each rank must have all of it",
                hint="leave out parallel=, or train_sync: local",
            )
        if sync_batchnorm:
            raise UsageError(
                "sync_batchnorm exchanges statistics in every step", hint="leave it out with local SGD"
            )

    def spread(self, model: Any, stepping: Stepping, save: Callable[[], object]) -> Way:
        """The model itself, with the first rank's values."""
        assert isinstance(stepping, LocalStepping)
        stepping.group.begin_alone()
        model = model.to(stepping.group.device)
        spread(model, stepping.group)
        self._course = LocalCourse(self._sync, stepping, Values(model), Recorder(stepping.balance.put))
        self._course.save = save
        return LocalWay(model, self._course)

    def loader(self, run: Course, dataset: Any, order: Order, wish: Wish, options: dict[str, Any]) -> LocalLoader:
        course = self._wrapped()
        course.order = order
        course.rounds = Rounds(wish, course.stepping.group.ranks)
        return LocalLoader(run, course, dataset, order, options)

    def wish(self, order: Order, least: int, mode: Mode, speeds: tuple[float, ...]) -> Wish:
        """A rank's own step has an equal part of the global batch."""
        batch = max(least, -(-order.global_batch // self._wrapped().stepping.group.ranks))
        return Wish(batch, self._sync.round_s, least, mode, speeds)

    def _wrapped(self) -> LocalCourse:
        if self._course is None:
            raise UsageError("there is no model yet", hint="model = run.wrap(model) before run.loader")
        return self._course

    def puts_off_checkpoint(self) -> bool:
        """Within a round, ranks have different models: they save one at the end of a round."""
        course = self._course
        if course is None or not course.is_in_round:
            self.settle()
            return False
        course.wants_checkpoint = True
        return True

    def settle(self) -> None:
        """All ranks call it; they have one model then, also if scripts have left their loops early."""
        if self._course is not None:
            self._course.settle()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        return None if self._course is None else self._course.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        course = self._course
        if state is None or course is None:
            return
        if state["left"]:  # else the epoch was over
            course.resumed = tuple((int(begin), int(end)) for begin, end in state["left"])
        course.outer.restore(state["momentum"], course.stepping.group.device)
        if state["rounds"] is not None and course.rounds is not None:
            course.rounds.restore(state["rounds"])


def has_holes(resumed: Mapping[str, Any] | None) -> bool:
    """Whether a checkpoint is from the middle of a round, of which ranks had used parts."""
    state = None if resumed is None else resumed.get("local")
    left = [] if resumed is None or state is None else state["left"]
    return len(left) > 1 or (bool(left) and resumed is not None and left[0][0] != resumed["progress"]["cursor"])


def refuse_holes(resumed: Mapping[str, Any]) -> None:
    """Other modes go on from one position of an epoch's order."""
    if has_holes(resumed):
        raise UgroError(
            "the checkpoint was saved in the middle of a round of local SGD", hint="resume it with train_sync: local"
        )
