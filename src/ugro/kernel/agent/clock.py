"""The agent's clock: the time by both clocks, what is to be believed of it, and who is told when it was set."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator

from ugro.kernel.agent import rules
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.agent.rules import Jump, Memory
from ugro.kernel.store.database import Store
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.moments import Reading, boot_clock_s
from ugro.kernel.support.quantities import format_duration


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


# --- watching the clock -----------------------------------------------------------------------------------------------
# Notices that this machine's clock was set, and says so: in the log, as an event, and for ``ugro doctor``.


log = logging.getLogger(__name__)

_LOOK_S = 2.0
_SAVE_S = 600.0
_REMEDY = "see whether it is right now: timedatectl; if not, set it"


class ClockWatch:
    def __init__(self, clock: Clock, store: Store, notice_s: Callable[[], float]) -> None:
        """``notice_s``: how long removals are held at least."""
        self.clock = clock
        self._store = store
        self._notice_s = notice_s
        self._unsaid: list[Jump] = []
        self._saved_s = 0.0
        clock.listen(self._unsaid.append)

    async def start(self) -> None:
        """Before anything is decided."""
        jump = self.clock.restore(await self._store.clock.read())
        if jump is not None:
            self._unsaid.append(jump)
        await self._say()

    async def run(self) -> None:
        while True:
            self.clock.look()
            self.clock.tell()
            try:
                if self._unsaid or boot_clock_s() - self._saved_s > _SAVE_S:
                    await self._say()
            except UgroError as error:
                log.error("cannot record that the clock was set: %s", error)
            await asyncio.sleep(_LOOK_S)

    def may_remove(self) -> bool:
        return self.clock.may_remove(self._notice_s())

    def findings(self) -> Iterator[Finding]:
        reading = self.clock.reading()
        jump = rules.recent_jump(self.clock.memory, reading.now)
        if self._is_held:
            jump = self.clock.memory.jump
        if jump is not None:
            yield Finding("this machine", "clock", Grade.WARNING, self._text(jump), _REMEDY)

    async def _say(self) -> None:
        self._saved_s = boot_clock_s()
        while self._unsaid:
            text = self._text(self._unsaid[0])
            await self._store.jobs.note("clock", text)
            log.warning("%s", text)
            del self._unsaid[0]
        await self._store.clock.write(self.clock.memory)

    @property
    def _is_held(self) -> bool:
        return rules.is_held(self.clock.memory, self.clock.reading(), self._notice_s())

    def _text(self, jump: Jump) -> str:
        held = self.clock.memory.held
        if held is None or not self._is_held:
            return f"{jump.text}; time limits and pauses are not changed by that"
        reading = self.clock.reading()
        left_s = rules.held_until_s(held, reading, self._notice_s()) - reading.now.boot_s
        return f"{jump.text}; time limits and pauses are not changed by that, and nothing old is removed for " + (
            format_duration(left_s)
        )
