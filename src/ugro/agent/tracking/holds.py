"""Nodes that take no new jobs for a short while, such as those that are being measured.

In memory only: an agent that is killed holds no node, and what it did there ends with its link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ugro.core.errors import NotAllowed


class Holds:
    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self.on_change: Callable[[], None] = lambda: None

    def reason(self, node: str) -> str | None:
        """As words after its name: "is being measured"."""
        return self._reasons.get(node)

    @contextmanager
    def hold(self, nodes: Sequence[str], reason: str) -> Iterator[None]:
        """All of them or none."""
        if taken := [node for node in nodes if node in self._reasons]:
            raise NotAllowed(self._reasons[taken[0]], subject=taken[0], hint="wait until that is over")
        self._reasons |= dict.fromkeys(nodes, reason)
        self.on_change()
        try:
            yield
        finally:
            for node in nodes:
                del self._reasons[node]
            self.on_change()
