"""What can go wrong with a map, for its caller."""

from __future__ import annotations

import reprlib
from typing import Any

from ugro.core.errors import UgroError

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
    from ugro.batch.frames import attempt

    problem, text = attempt(_SHORT.repr, item)
    return f"a {type(item).__name__}" if problem else str(text)


class ResultsUnreadable(UgroError):
    """Results arrived, and their pickle cannot be loaded in this process."""

    kind = "results_unreadable"
