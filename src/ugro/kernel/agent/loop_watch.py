"""Notices when the agent's loop stands still, says where, and has a thread speak to the nodes meanwhile.

What keeps the loop busy keeps all of the agent busy: every command waits, and leases would run out. Two threads look at
it: one only speaks, so that nothing holds it up; the other says where the loop is. A single call that holds Python's
interpreter holds both; it is reported when it is over. A process that is stopped does nothing, and its leases run out.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import ugro
from ugro.kernel.agent.model import StoodStill

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_SPEAKS_AFTER_LOOKS = 2
_SAYS_AFTER_LOOKS = 6  # looks rather than seconds: a machine that is slow or asleep holds up this thread as well
_HELD_S = 3.0
_MOST_FRAMES = 6
_SOURCES = str(Path(ugro.__file__).parents[1]) + "/"
# An agent whose loop stands for longer is as good as dead: from then on the leases of its jobs run out.
SPEAKS_FOR_S = 300.0


class LoopWatch:
    def __init__(self, speaks_for_s: float = SPEAKS_FOR_S) -> None:
        self.last: StoodStill | None = None
        self._speaks_for_s = speaks_for_s
        self._beats = 0
        self._beat_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._main = 0
        self._ended = threading.Event()

    def start(self, speak: Callable[[], None]) -> None:
        """Watches the running loop. ``speak`` is called by a thread, again and again, while it stands."""
        self._main = threading.get_ident()
        self._beat(asyncio.get_running_loop())
        threading.Thread(target=self._speak_for_loop, args=(speak,), name="speak for the loop", daemon=True).start()
        threading.Thread(target=self._say_where_it_stands, name="watch the loop", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beats += 1
        self._beat_at = time.monotonic()
        self._timer = loop.call_later(_LOOK_S / 2, self._beat, loop)

    def _speak_for_loop(self, speak: Callable[[], None]) -> None:
        seen, looks = 0, 0
        while not self._ended.wait(_LOOK_S):
            seen, looks = self._beats, looks + 1 if seen == self._beats else 0
            if looks >= _SPEAKS_AFTER_LOOKS and time.monotonic() - self._beat_at < self._speaks_for_s:
                try:
                    speak()
                except Exception:  # the top of a daemon's loop: the next look tries again
                    log.exception("the nodes cannot be spoken to while the loop stands")

    def _say_where_it_stands(self) -> None:
        seen, looks = 0, 0
        looked_at, used_s = time.monotonic(), time.process_time()
        where, since = "", self._beat_at
        while not self._ended.wait(_LOOK_S):
            before_s, before_used_s = looked_at, used_s
            looked_at, used_s = time.monotonic(), time.process_time()
            held_s = looked_at - before_s
            if held_s > _HELD_S and used_s - before_used_s > held_s / 2:  # not stopped, and not waiting for a processor
                self._note(held_s, f"one call that held the interpreter, near {self._place()}")
            if seen != self._beats:
                if where:
                    stood_s = self._beat_at - since
                    self._note(stood_s, where)
                    log.warning("the agent goes on after it stood still for %.1f s", stood_s)
                seen, looks, where, since = self._beats, 0, "", self._beat_at
                continue
            looks += 1
            if looks == _SAYS_AFTER_LOOKS:
                where = self._place()
                self._note(looked_at - since, where)

    def _place(self) -> str:
        frame = sys._current_frames().get(self._main)
        frames = traceback.extract_stack(frame)[::-1][:_MOST_FRAMES] if frame is not None else []
        return " ← ".join(f"{one.name} ({one.filename.removeprefix(_SOURCES)}:{one.lineno})" for one in frames)

    def _note(self, seconds: float, where: str) -> None:
        is_new = self.last is None or self.last.where != where
        self.last = StoodStill(datetime.now(UTC).isoformat(timespec="seconds"), round(seconds, 1), where)
        if is_new:
            log.error("the agent has stood still for %.1f s: %s", seconds, where)
