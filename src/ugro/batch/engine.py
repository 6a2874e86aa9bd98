"""What a pool needs of an engine: slots that take batches, answer them, and may die.

A *slot* is one process that runs one batch after the other. A batch and its answer are lists of byte buffers, which an
engine carries as they are, in order: ``frames`` makes and reads them. On the slot's side an engine calls
``worker.Worker.answer`` with a batch, and sends what it returns.

All calls come from one thread. None but ``wait`` blocks for longer than it takes to pass the bytes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
