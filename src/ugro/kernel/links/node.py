"""A node as the agent sees it: keeps its link open, and knows why when it is not.

A lost link is dialled again with growing, jittered pauses. Callers wait in ``ready``, which never takes longer than
one attempt: a node that is down does not delay others. Background work does not cut long pauses short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate

from ugro.kernel.access.model import account_of
from ugro.kernel.links import diagnosis
from ugro.kernel.links.calls import P, Stream, asked
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import LinkQuality, Machine, NodeSpec
from ugro.kernel.links.transport import LINK_ENVIRONMENT, SshOptions
from ugro.kernel.support.errors import Unreachable
from ugro.kernel.support.moments import boot_clock_s, delay_s, denied_pause_s
from ugro.node.program import Call

log = logging.getLogger(__name__)

_LASTING_PAUSE_S = 60.0
_MOST_DENIALS = 10  # that are counted
_WAKE_DENIED_AT_MOST_EVERY_S = 20.0
# A good connection is open by then; and even if many nodes hang, the next one in the queue is dialled soon.
_SLOT_S = 0.5
_WAKE_AT_MOST_EVERY_S = 1.0
# A link that breaks sooner counts as a failure; otherwise a node that dies at every start would be dialled for ever.
_LASTING_LINK_S = 10.0


@dataclass(frozen=True, slots=True)
class Dialling:
    """How all nodes of a cluster are dialled."""

    options: SshOptions
    quick_retries: int
    # Limits how many connections are opened at once (sshd's MaxStartups, our own CPU).
    slots: asyncio.Semaphore
    # Read at each dial: the user's ssh-agent socket may change while the agent runs.
    environment: Callable[[], Mapping[str, str]]


class Node:
    def __init__(self, spec: NodeSpec, dialling: Dialling) -> None:
        self.spec = spec
        self.dialling = dialling  # used by the next dial
        self.error: Unreachable | None = None
        self._down_s: float | None = None  # when it became unreachable, by the clock of our boot
        self._linked_at = float("-inf")
        self._link: Link | None = None
        self._machine: Machine | None = None
        self._attempts = 0
        self._denied: list[float] = []  # attempts in a row at which the login was denied: when, by our boot's clock
        self.is_resting = False  # it sleeps: it is dialled rarely, to notice that somebody has woken it
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[None] = self._loop.create_future()
        self._is_dialling = False
        self._dialled_at = float("-inf")
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._keep_open(), name=f"keep {spec.name} open")
        self._task.add_done_callback(self._note_end)

    @property
    def link(self) -> Link | None:
        return self._link

    @property
    def machine(self) -> Machine | None:
        return self._machine

    @property
    def since(self) -> datetime | None:
        """When it became unreachable, by the wall clock as it goes now."""
        if self._down_s is None:
            return None
        return datetime.now(UTC) - timedelta(seconds=boot_clock_s() - self._down_s)

    @property
    def quality(self) -> LinkQuality:
        return self._link.quality if self._link else LinkQuality()

    @property
    def alive_since(self) -> float | None:
        """When its link opened, or answered again after silence, in monotonic seconds."""
        if self._link is None:
            return None
        return max(self._linked_at, self._link.revived_at or self._linked_at)

    @property
    def _has_lasting_error(self) -> bool:
        return self.error is not None and self.error.cause in diagnosis.LASTING_CAUSES

    @property
    def _is_left_alone(self) -> bool:
        # A name that is not found is no failed login, and is found again when this machine's network is back.
        is_lasting = self._has_lasting_error and not self._lacks_name
        return self.is_resting or is_lasting

    @property
    def _lacks_name(self) -> bool:
        return self.error is not None and self.error.cause == diagnosis.NAME_NOT_FOUND

    @property
    def denied_s(self) -> float:
        """From the first to the last of the attempts at which it was denied, with nothing else between them."""
        return self._denied[-1] - self._denied[0] if self._denied else 0.0

    @property
    def _is_denied_login(self) -> bool:
        return bool(self._denied and account_of(self.spec.name))

    async def ready(self, timeout_s: float, *, patiently: bool = False) -> Link:
        """Returns the open link, or makes an attempt now and returns or raises its outcome.

        ``patiently``: for work that asks again and again. Where attempts are rare for a reason, it gets the last error.
        """
        if (link := self.link) is not None:
            return link
        if not (patiently and self._is_left_alone):
            self.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._outcome)
        if (link := self.link) is not None:
            return link
        if self.error is None:
            raise diagnosis.still_connecting(self.spec, timeout_s)
        # Raised for every caller: otherwise each would keep the traceback frames of all before it.
        raise self.error.with_traceback(None)

    def wake(self) -> None:
        """Dials now instead of at the end of the pause."""
        is_busy = self._link is not None or self._is_dialling or self._task.done() or not self._outcome.done()
        every_s = _WAKE_DENIED_AT_MOST_EVERY_S if self._is_denied_login else _WAKE_AT_MOST_EVERY_S
        if not is_busy and self._loop.time() - self._dialled_at >= every_s:
            self._outcome = self._loop.create_future()
            self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep_open(self) -> None:
        while True:
            link = await self._dial()
            self._settle()
            if link is not None:
                await self._hold(link)
            await self._pause()

    async def _hold(self, link: Link) -> None:
        opened_at = self._loop.time()
        try:
            self._note_down(await asyncio.shield(link.lost))
        except asyncio.CancelledError:
            link.close()
            raise
        finally:
            await link.wait_closed()
        if self._loop.time() - opened_at > _LASTING_LINK_S:
            self._attempts = 0

    async def _dial(self) -> Link | None:
        self._is_dialling = True
        self._wake.clear()
        if self._outcome.done():
            self._outcome = self._loop.create_future()
        try:
            link = await self._open()
        except Unreachable as error:
            self._note_down(error)
            return None
        finally:
            self._is_dialling = False
            self._dialled_at = self._loop.time()
        self._machine = link.machine
        self._link, self.error, self._down_s = link, None, None
        self._denied = []
        self._linked_at = self._loop.time()
        log.info("connected", extra={"node": self.spec.name})
        return link

    async def _open(self) -> Link:
        """Opens within a slot, but releases the slot early if this node is slow: it must not delay others."""
        slots = self.dialling.slots
        await slots.acquire()
        late = self._loop.call_later(_SLOT_S, slots.release)
        try:
            return await self._connect()
        finally:
            if self._loop.time() < late.when():
                late.cancel()
                slots.release()

    async def _connect(self) -> Link:
        options = self.dialling.options
        env = {**os.environ, **LINK_ENVIRONMENT, **self.dialling.environment()}
        # ssh has its own limit for connecting; starting the program on a busy node may take as long again.
        return await Link.open(self.spec, options, timeout_s=2 * options.connect_timeout_s, env=env)

    def _note_down(self, error: Unreachable) -> None:
        self._link = None
        self._denied = [*self._denied[:_MOST_DENIALS], boot_clock_s()] if error.cause == diagnosis.DENIED else []
        self._down_s = self._down_s if self._down_s is not None else boot_clock_s()
        if self.error is None or self.error.cause != error.cause:
            log.warning("unreachable: %s", error.message, extra={"node": self.spec.name, "cause": error.cause})
        self.error = error

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Releases all waiters when this node is closed, or when a bug ended its task."""
        self._link = None
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("link task ended by an error", exc_info=bug, extra={"node": self.spec.name})
            self.error = diagnosis.closed(self.spec, f"{type(bug).__name__}: {bug}")
        elif self.error is None:
            self.error = diagnosis.closed(self.spec, "its entry was changed or removed")
        self._settle()

    def _settle(self) -> None:
        if not self._outcome.done():
            self._outcome.set_result(None)

    async def _pause(self) -> None:
        self._attempts += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s()):
                await self._wake.wait()

    def _pause_s(self) -> float:
        if self._is_denied_login:
            return denied_pause_s(len(self._denied), random.random())
        if self._has_lasting_error:
            return _LASTING_PAUSE_S * random.uniform(0.8, 1.2)
        if self.is_resting:
            return _LASTING_PAUSE_S * random.uniform(0.4, 0.6)
        if self._attempts <= self.dialling.quick_retries:
            return delay_s(self._attempts, random.random(), cap_s=2.0)
        return delay_s(self._attempts, random.random())


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Identity:
    """Who asks: nodes keep the runs of different agents apart, and refuse an agent that was replaced.

    ``generation`` is raised when the user has decided that this agent goes on after an older state was put back.
    """

    agent: str
    generation: int
    key: bytes = field(default=b"", repr=False)  # for what we leave on nodes; empty: nothing is left there

    def params(self, **more: Any) -> dict[str, Any]:
        return {"agent": self.agent, "generation": self.generation, **more}

    def asks(
        self, serve: Callable[Concatenate[Call, P], None], *_: P.args, **params: P.kwargs
    ) -> tuple[str, dict[str, Any]]:
        """As ``asked``, and says who asks."""
        method, more = asked(serve, *_, **params)
        return method, self.params(**more)


@dataclass(frozen=True, slots=True)
class NodeCalls:
    """The base of what an agent asks of one part of a node program."""

    node: Node
    identity: Identity
    connect_s: float

    @property
    def name(self) -> str:
        return self.node.spec.name

    async def _call(
        self, serve: Callable[Concatenate[Call, P], None], timeout_s: float, *_: P.args, **params: P.kwargs
    ) -> dict[str, Any]:
        link = await self.node.ready(self.connect_s, patiently=True)
        return await link.call(*self.identity.asks(serve, *_, **params), timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def _stream(
        self, serve: Callable[Concatenate[Call, P], None], *_: P.args, **params: P.kwargs
    ) -> AsyncIterator[tuple[Link, Stream]]:
        link = await self.node.ready(self.connect_s, patiently=True)
        stream = link.stream(*self.identity.asks(serve, *_, **params))
        try:
            yield link, stream
        finally:
            stream.cancel()
