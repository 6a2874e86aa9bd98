"""Notifications: messages wait in one short queue per channel and are retried for a while. Nothing waits for them.

A channel that is away delays no other. What does not fit into a queue, or could not be sent for long, is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ugro.config.channels import Channel
from ugro.policy.lifecycle.backoff import delay_s
from ugro.telemetry.channels import SendFailure, channel_of, send
from ugro.telemetry.message import Message

log = logging.getLogger(__name__)

_MOST_WAITING = 200
_GOODBYE_S = 3.0


@dataclass(frozen=True, slots=True)
class Patience:
    tries: int = 8
    base_s: float = 1.0
    cap_s: float = 120.0


class Notifier:
    def __init__(self, channels: Callable[[], Mapping[str, Channel]], patience: Patience | None = None) -> None:
        """``channels`` is called for each attempt, so an edit of the configuration takes effect at once."""
        self._channels = channels
        self._patience = patience or Patience()
        self._queues: dict[str, asyncio.Queue[Message]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by channel and sent, failed or dropped

    def tell(self, names: Iterable[str], message: Message) -> None:
        for name in dict.fromkeys(names):
            queue = self._queues.setdefault(name, asyncio.Queue(_MOST_WAITING))
            try:
                queue.put_nowait(message)
            except asyncio.QueueFull:
                self._note(name, "dropped", f"channel {name}: too much waits for it; not sent: {message.title}")
            if name not in self._tasks or self._tasks[name].done():
                self._tasks[name] = asyncio.create_task(self._empty(name, queue), name=f"tell {name}")

    async def test(self, name: str, message: Message) -> None:
        """Sends once; raises on failure."""
        await asyncio.to_thread(send, name, channel_of(self._channels(), name), message)

    async def close(self) -> None:
        """Sends what can be sent at once, and drops the rest."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=_GOODBYE_S)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _empty(self, name: str, queue: asyncio.Queue[Message]) -> None:
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                await self._send(name, queue.get_nowait())

    async def _send(self, name: str, message: Message) -> None:
        for attempt in range(1, self._patience.tries + 1):
            try:
                await self.test(name, message)
            except SendFailure as error:
                if not error.may_pass or attempt == self._patience.tries:
                    self._note(name, "failed", f"{error.message}; given up: {message.title}")
                    return
                await asyncio.sleep(
                    delay_s(attempt, random.random(), base_s=self._patience.base_s, cap_s=self._patience.cap_s)
                )
            else:
                self.outcomes[name, "sent"] += 1
                return

    def _note(self, name: str, outcome: str, text: str) -> None:
        self.outcomes[name, outcome] += 1
        log.error("%s", text)
