"""What a run does differently with local SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ugro.core.errors import UgroError, UsageError
from ugro.policy.balance.mode import Mode
from ugro.policy.local.rounds import Rounds, Wish
from ugro.policy.local.sync import Sync
from ugro.train.loader import Course
from ugro.train.local.course import LocalCourse
from ugro.train.local.loader import LocalLoader
from ugro.train.local.record import Recorder
from ugro.train.local.stepping import LocalStepping
from ugro.train.local.values import Values, spread
from ugro.train.parallel.way import Way
from ugro.train.sampler import Order
from ugro.train.stepping import Stepping


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
