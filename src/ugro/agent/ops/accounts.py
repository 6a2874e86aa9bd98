"""What the user database of this machine says: what a user id is called, and who is in a group.

It may be far away and slow, so the agent's loop never asks it: threads do, one for each question that is open. An
answer holds for a while and is asked for again before that is over. Without an answer in time, nobody is let in.
"""

from __future__ import annotations

import asyncio
import grp
import logging
import pwd
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

KNOWN_S = 30.0  # how long an answer holds
ASKED_AGAIN_S = 15.0  # from then on it is asked for again; meanwhile the old answer stays
_WAIT_S = 5.0
_MOST_KNOWN = 1024
_MOST_OPEN = 16  # questions: each has a thread, which a database that hangs keeps

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lookups(Generic[K, V]):
    """``look`` blocks, and returns None for what is not known."""

    def __init__(
        self,
        look: Callable[[K], V | None],
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._look = look
        self._clock = clock
        self._wait_s = wait_s
        self._known: dict[K, tuple[float, V | None]] = {}  # since when; the oldest first
        self._open: dict[K, asyncio.Future[None]] = {}

    def known(self, key: K) -> V | None:
        """From what is known now, without asking."""
        since, value = self._known.get(key, (float("-inf"), None))
        return value if self._clock() - since < KNOWN_S else None

    async def of(self, key: K) -> V | None:
        """None: there is no such thing, or the database has not answered in time, which looks the same."""
        age_s = self._clock() - self._known.get(key, (float("-inf"), None))[0]
        if age_s < ASKED_AGAIN_S:
            return self.known(key)
        answer = self._open.get(key) or self._ask(key)
        if age_s >= KNOWN_S and answer is not None:
            try:
                async with asyncio.timeout(self._wait_s):
                    await asyncio.shield(answer)
            except TimeoutError:
                log.warning("the user database has not answered within %g s: %s", self._wait_s, key)
        return self.known(key)

    def _ask(self, key: K) -> asyncio.Future[None] | None:
        if len(self._open) >= _MOST_OPEN:
            return None
        loop = asyncio.get_running_loop()
        answer = self._open[key] = loop.create_future()
        # Not one of the loop's own threads: there are few, and one that hangs would be joined when the agent ends.
        asking = threading.Thread(target=self._in_thread, args=(key, loop), name=f"look up {key}", daemon=True)
        asking.start()
        return answer

    def _in_thread(self, key: K, loop: asyncio.AbstractEventLoop) -> None:
        value = self._look(key)
        with suppress(RuntimeError):  # the agent has ended
            loop.call_soon_threadsafe(self._answered, key, value)

    def _answered(self, key: K, value: V | None) -> None:
        self._known.pop(key, None)
        while len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = (self._clock(), value)
        answer = self._open.pop(key)
        if not answer.done():
            answer.set_result(None)


def user_name(uid: int) -> str | None:
    """Blocks."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def is_member(whose: tuple[str, str]) -> bool:
    """A user and a group. Blocks."""
    user, group = whose
    try:
        found = grp.getgrnam(group)
        return user in found.gr_mem or pwd.getpwnam(user).pw_gid == found.gr_gid
    except (KeyError, OSError):
        return False
