"""The agent's clock: the time by both clocks, what is to be believed of it, and who is told when it was set."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ugro.core.support import clock
from ugro.core.support.moment import Reading
from ugro.policy.lifecycle import clock as rules
from ugro.policy.lifecycle.clock import Jump, Memory


class Clock:
    """Any thread may look at it; listeners are called by ``tell``."""

    def __init__(self) -> None:
        self._started = clock.now()
        self.memory = Memory(self._started)
        self._changing = threading.Lock()
        self._untold: list[Jump] = []
        self._listeners: list[Callable[[Jump], None]] = []

    def restore(self, memory: Memory | None) -> Jump | None:
        """What the agent before us knew. Returns what has happened to the clock since."""
        self.memory, jump = rules.look(memory, self._started)
        return jump

    def listen(self, on_jump: Callable[[Jump], None]) -> None:
        self._listeners.append(on_jump)

    def reading(self) -> Reading:
        now = clock.now()
        return Reading(now, self._started, rules.is_doubtful(self.memory, now))

    def look(self) -> None:
        """Notices that the wall clock was set."""
        with self._changing:
            self.memory, jump = rules.look(self.memory, clock.now())
            self._untold += [jump] if jump is not None else []

    def tell(self) -> None:
        while self._untold:
            jump = self._untold.pop(0)
            for on_jump in self._listeners:
                on_jump(jump)

    def may_remove(self, notice_s: float = 0.0) -> bool:
        """Whether something may be removed because it is old."""
        self.look()
        if self.memory.held is None:
            return True
        if rules.is_held(self.memory, self.reading(), notice_s):
            return False
        with self._changing:
            self.memory = rules.released(self.memory)
        return True
