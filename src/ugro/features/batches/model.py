"""What a pool needs of an engine: slots that take batches, answer them, and may die.

A *slot* is one process that runs one batch after the other. A batch and its answer are lists of byte buffers, which an
engine carries as they are, in order: ``frames`` makes and reads them. On the slot's side an engine calls
``worker.Worker.answer`` with a batch, and sends what it returns.

All calls come from one thread. None but ``wait`` blocks for longer than it takes to pass the bytes on.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev
from typing import Any, Protocol

from ugro.kernel.support.errors import UgroError

Buffer = bytes | bytearray | memoryview
Parts = Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class SlotReady:
    """A new slot. Its number was never used before; how fast it is, nobody knows yet."""

    slot: int
    node: str  # where it is, shown to users


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the oldest batch that the slot has."""

    slot: int
    parts: Parts


@dataclass(frozen=True, slots=True)
class SlotLost:
    """The slot ended: by itself, by ``end``, or with its machine. Its batches will not be answered.

    ``at``: the index of the item that it had begun, as the worker noted it; None: not known. ``is_innocent``: no item
    can be the cause, as when a machine was lost or the slot was never ready.
    """

    slot: int
    reason: str  # "killed by SIGSEGV", "exit code 3"
    at: int | None = None
    is_innocent: bool = False


Event = SlotReady | Answered | SlotLost


class Engine(Protocol):
    @property
    def name(self) -> str:
        """The word for it: ``local``, ``ray``, ``jobs``."""

    def dumps(self, value: Any, buffer_callback: Callable[[Any], Any] | None) -> bytes:
        """Pickles so that the slots can load it, functions of ``__main__`` by value."""

    def start(self) -> int:
        """Starts slots, as many as the pool asked for; a ``SlotReady`` follows for each. Returns how many."""

    def publish(self, parts: Parts) -> str:
        """Makes it available to all slots, also to later ones, and carries it once to each place.

        Returns the name by which the ``fetch`` of a ``Worker`` finds it; a name is never used twice.
        """

    def withdraw(self, name: str) -> None:
        """Nobody will fetch it again."""

    def send(self, slot: int, parts: Parts) -> None:
        """Batches of a slot are run in the order in which they were sent. To a slot that died it does nothing."""

    def wait(self, timeout_s: float | None) -> list[Event]:
        """What happened; empty after the timeout. None: until something happens."""

    def end(self, slot: int) -> None:
        """Ends the slot and all that its process started, at once; a ``SlotLost`` follows."""

    def replace(self) -> None:
        """One more slot, in place of one that was lost; a ``SlotReady`` follows, or a ``SlotLost`` that is innocent."""

    def close(self) -> None:
        """Ends every slot, and waits until nothing of them is left."""


# --- errors -----------------------------------------------------------------------------------------------------------
# What can go wrong with a map, for its caller.


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class ItemFailed(UgroError):
    """One item has no result. The others have theirs.

    ``traceback`` is that of the function, as text; ``__cause__`` is its exception, if it could be carried here.
    """

    kind = "item_failed"

    def __init__(self, index: int, item: Any, message: str, *, cause_kind: str, traceback: str = "", node: str = ""):
        super().__init__(f"{message} (input: {shown(item)})", subject=f"item {index}")
        self.index = index
        self.item = item
        self.cause_kind = cause_kind  # the class of the exception, or Died, TimedOut, NotJson, Unpicklable, Unreadable
        self.reason = message
        self.traceback = traceback
        self.node = node

    def to_wire(self) -> dict[str, Any]:
        own = {"index": self.index, "cause": self.cause_kind, "traceback": self.traceback, "node": self.node}
        return {**super().to_wire(), **own}


class FunctionUnusable(UgroError):
    """The function, or what is shared with it, cannot be carried to where it should run."""

    kind = "function_unusable"


class PoolBroken(UgroError):
    """The pool has no slot any more, and gets none."""

    kind = "pool_broken"


class PoolClosed(UgroError):
    kind = "pool_closed"


def shown(item: Any) -> str:
    """A short text, whatever its own ``repr`` does."""
    from ugro.features.batches.worker import attempt

    problem, text = attempt(_SHORT.repr, item)
    return f"a {type(item).__name__}" if problem else str(text)


class ResultsUnreadable(UgroError):
    """Results arrived, and their pickle cannot be loaded in this process."""

    kind = "results_unreadable"


# --- estimate ---------------------------------------------------------------------------------------------------------
# What a map would take: a sample of its items, places where it could run, and what is predicted of each.


class Bound(StrEnum):
    WORK = "work"
    DRIVER = "driver"
    DATA = "data"
    LONGEST = "longest"


@dataclass(frozen=True, slots=True)
class Sample:
    items: int  # of the whole input
    costs_s: tuple[float, ...]  # of some, on one core of this machine
    item_bytes: float
    result_bytes: float

    @property
    def work_s(self) -> float:
        return self.items * fmean(self.costs_s)

    @property
    def error(self) -> float:
        """Of the mean, relative: 0.1 is ± 10 %, two times of three."""
        mean_s = fmean(self.costs_s)
        if len(self.costs_s) < 2 or len(self.costs_s) >= self.items or mean_s <= 0:
            return 0.0
        return stdev(self.costs_s) / math.sqrt(len(self.costs_s)) / mean_s

    @property
    def data_bytes(self) -> float:
        return self.items * (self.item_bytes + self.result_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the work could be done, from the simplest to the largest."""

    name: str  # "one core", "this machine", "3 nodes"
    slots: int
    speed: float = 1.0  # of one slot while all are busy, against the core of the sample
    start_s: float = 0.0  # until the first item can begin
    slot_item_s: float = 0.0  # a slot's time for an item, beside the function
    driver_item_s: float = 0.0
    bytes_per_s: float | None = None  # to and from it; None: no bound
    is_here: bool = False  # its slots and the driver share the same cores: copying data is work, too
    is_assumed: bool = False  # not all of its figures were measured


@dataclass(frozen=True, slots=True)
class Prediction:
    place: Place
    seconds: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class Estimate:
    sample: Sample
    predictions: tuple[Prediction, ...]  # in the order of the places
    best: int  # which of them is recommended
    reason: str

    @property
    def recommended(self) -> Prediction:
        return self.predictions[self.best]
