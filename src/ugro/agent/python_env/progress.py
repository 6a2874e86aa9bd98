"""How far environments are that are being made, for all who wait for them or ask."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ugro.core.errors import UgroError
from ugro.core.python_env import EnvProgress
from ugro.core.support.quantity import format_size
from ugro.policy.python_env.words import phase_in_words

_MOST_BREAKS = 10
Key = tuple[str, str]  # a node and the name of an environment; empty: it is being resolved
Listener = Callable[[EnvProgress], None]


@dataclass(slots=True)
class Making:
    """One environment on one node, for all who wait for it."""

    progress: EnvProgress = field(default_factory=lambda: EnvProgress("resolving"))
    moved_at: float = field(default_factory=time.monotonic)
    listeners: list[Listener] = field(default_factory=list)

    def tell(self, progress: EnvProgress) -> None:
        self.progress, self.moved_at = progress, time.monotonic()
        for listen in self.listeners:
            listen(progress)


class UnderWay:
    def __init__(self) -> None:
        self._makings: dict[Key, Making] = {}
        self._moved: dict[str, float] = {}  # by node, when a making that broke off last made progress
        self._breaks: dict[Key, int] = {}  # since one was finished

    @contextlib.contextmanager
    def following(self, key: Key, listener: Listener) -> Iterator[Making]:
        """``listener`` hears how far it is now, which another may have begun long ago, and all that follows."""
        making = self._makings.setdefault(key, Making())
        making.listeners.append(listener)
        listener(making.progress)
        try:
            yield making
            self._breaks.pop(key, None)
        except UgroError:
            self._note_break(key, making)
            raise
        finally:
            making.listeners.remove(listener)
            if not making.listeners:
                self._makings.pop(key, None)

    def _note_break(self, key: Key, making: Making) -> None:
        """Not without end: a node that fails whenever an installer starts there makes no progress."""
        node, name = key
        self._breaks[key] = self._breaks.get(key, 0) + 1
        if name and self._breaks[key] <= _MOST_BREAKS:
            self._moved[node] = making.moved_at

    def in_words(self, nodes: Sequence[str]) -> str | None:
        """A sentence, while environments are made on some of these nodes."""
        found = {node: one.progress for (node, _), one in self._makings.items() if node in nodes}
        if not found:
            return None
        node, progress = min(found.items(), key=lambda item: item[1].done / (item[1].total or 1))
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return f"making the Python environment on {node}{more}: {_in_words(progress)}"

    def moved_at(self, nodes: Sequence[str]) -> float:
        """When something last went on there, by the monotonic clock; 0: nothing ever did.

        Also of what broke off: a link that is lost for a moment must not look as if nothing had been done until then.
        """
        now = (one.moved_at for (node, _), one in self._makings.items() if node in nodes)
        return max((*now, *(self._moved.get(node, 0.0) for node in nodes)), default=0.0)


def _in_words(progress: EnvProgress) -> str:
    if progress.phase == "installing" and progress.total:
        return f"{progress.done} of {progress.total} packages"
    if progress.phase in ("downloading", "sending") and progress.bytes:
        return f"{phase_in_words(progress.phase)}, {format_size(progress.bytes)}"
    return phase_in_words(progress.phase)
