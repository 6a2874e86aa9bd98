"""A node seen from the agent: keeps its link open, and says why when it is not.

A lost link is dialled again by itself with growing, jittered pauses. Whoever needs the node waits in ``ready``,
which never waits longer than one attempt: a node that is down delays nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ugro.core.codec import decode
from ugro.core.errors import TimedOut, Unreachable
from ugro.core.node import LinkQuality, Machine, NodeSpec
from ugro.nodes.diagnosis import LASTING_CAUSES
from ugro.nodes.link import Link
from ugro.nodes.transport import SshOptions
from ugro.policy.backoff import delay_s

log = logging.getLogger(__name__)

_LASTING_PAUSE_S = 60.0
_SLOT_S = 1.0
_WAKE_AT_MOST_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Dialling:
    """How all nodes of a cluster are dialled."""

    options: SshOptions
    quick_retries: int
    # Bounds how many connections are being opened at once (sshd's MaxStartups, our own CPU).
    slots: asyncio.Semaphore
    # Read at each dial: the user's ssh-agent socket changes while the agent lives on.
    environment: Callable[[], Mapping[str, str]]


class Node:
    def __init__(self, spec: NodeSpec, dialling: Dialling) -> None:
        self.spec = spec
        self.error: Unreachable | None = None
        self.since: datetime | None = None  # when it became unreachable
        self._dialling = dialling
        self._link: Link | None = None
        self._machine: Machine | None = None
        self._attempts = 0
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_dialling = False
        self._dialled_at = float("-inf")
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._keep_open(), name=f"keep {spec.name} open")

    @property
    def link(self) -> Link | None:
        return self._link

    @property
    def machine(self) -> Machine | None:
        return self._machine

    @property
    def quality(self) -> LinkQuality:
        return self._link.quality if self._link else LinkQuality()

    async def ready(self, timeout_s: float) -> Link:
        """The open link; if there is none, the outcome of an attempt made now."""
        if (link := self.link) is not None:
            return link
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._outcome)
        except TimeoutError:
            if self.error is None:
                raise TimedOut(
                    f"still connecting after {timeout_s:g} s", subject=self.spec.name, hint="try again in a moment"
                ) from None
        if (link := self.link) is not None:
            return link
        assert self.error is not None
        raise self.error

    def wake(self) -> None:
        """Dials now instead of at the end of the pause."""
        if not self._is_dialling and self._outcome.done():
            recently = asyncio.get_running_loop().time() - self._dialled_at < _WAKE_AT_MOST_EVERY_S
            if not recently:
                self._outcome = asyncio.get_running_loop().create_future()
                self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _keep_open(self) -> None:
        while True:
            link = await self._dial()
            self._settle()
            if link is not None:
                reason = await asyncio.shield(link.lost)
                self._note_down(reason)
            await self._pause()

    async def _dial(self) -> Link | None:
        self._is_dialling = True
        if self._outcome.done():
            self._outcome = asyncio.get_running_loop().create_future()
        try:
            link = await self._open()
        except Unreachable as error:
            self._note_down(error)
            return None
        finally:
            self._is_dialling = False
            self._dialled_at = asyncio.get_running_loop().time()
        self._machine = decode(Machine, link.machine)
        self._link, self.error, self.since, self._attempts = link, None, None, 0
        log.info("connected", extra={"node": self.spec.name})
        return link

    async def _open(self) -> Link:
        """Opens within a slot, but gives the slot back when this node is slow: it must not delay the others."""
        slots = self._dialling.slots
        await slots.acquire()
        late = asyncio.get_running_loop().call_later(_SLOT_S, slots.release)
        try:
            return await self._connect()
        finally:
            if asyncio.get_running_loop().time() < late.when():
                late.cancel()
                slots.release()

    async def _connect(self) -> Link:
        options = self._dialling.options
        env = {**os.environ, **self._dialling.environment()}
        # The connection has its own limit; starting the program on a busy node may take as long again.
        return await Link.open(self.spec, options, timeout_s=2 * options.connect_timeout_s, env=env)

    def _note_down(self, error: Unreachable) -> None:
        self._link = None
        self.since = self.since or datetime.now(UTC)
        if self.error is None or self.error.cause != error.cause:
            log.warning("unreachable: %s", error.message, extra={"node": self.spec.name, "cause": error.cause})
        self.error = error

    def _settle(self) -> None:
        if not self._outcome.done():
            self._outcome.set_result(None)

    async def _pause(self) -> None:
        self._attempts += 1
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s()):
                await self._wake.wait()

    def _pause_s(self) -> float:
        if self.error is not None and self.error.cause in LASTING_CAUSES:
            return _LASTING_PAUSE_S * random.uniform(0.8, 1.2)
        if self._attempts <= self._dialling.quick_retries:
            return delay_s(self._attempts, random.random(), cap_s=2.0)
        return delay_s(self._attempts, random.random())
