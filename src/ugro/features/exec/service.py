"""`ugro exec`: runs one command on several nodes at once; their output is interleaved as it comes.

The command ends with the client that started it, and nothing is stored. For work that outlives its terminal there are
jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.features.exec.operations import EndCommand, RunCommand
from ugro.kernel.access.model import Caller
from ugro.kernel.links.calls import Stream
from ugro.kernel.links.calls import asked as asked_of
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Node
from ugro.kernel.operations.request import answers
from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import NotFound, RemoteFailure, UgroError, UsageError
from ugro.node import wire
from ugro.node.process.execute import execute

_QUEUED_CHUNKS = 64
_OVERHEAD = 1024  # bytes of a call besides the command itself
_END = 0  # not the kind of any frame


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended, as reported by its node: with an exit code, or by a signal."""

    code: int | None = None
    signal: int | None = None
    unkillable: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # A process can end in no other way; a node is not trusted.
        is_one_of_them = (self.code is None) != (self.signal is None)
        if not is_one_of_them or not 0 <= (self.code or 0) <= 255 or not 0 <= (self.signal or 0) <= 64:
            raise ValueError(f"code {self.code}, signal {self.signal}")


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]
    cwd: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if len(dumps([self.argv, self.cwd, self.env])) > wire.MAX_PAYLOAD - _OVERHEAD:
            raise UsageError("the command is longer than 1 MiB", hint="put it into a file on the nodes")


class Executions:
    """The commands that run, by the keys that their clients have made up."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._running: dict[str, Execution] = {}

    @property
    def count(self) -> int:
        return len(self._running)

    @answers(RunCommand)
    async def run(self, asked: RunCommand, caller: Caller) -> AsyncGenerator[bytes]:
        nodes = self._cluster.inventory.select(asked.nodes)
        command = Command(asked.argv, asked.cwd, tuple(asked.env.items()), asked.grace_s)
        # A node that is connecting for the first time gets the time a connection may take.
        return self._frames(asked.key, Execution(nodes, command, 2 * self._cluster.config.ssh.connect_timeout))

    async def _frames(self, key: str, execution: Execution) -> AsyncGenerator[bytes]:
        self._running[key] = execution
        try:
            async with contextlib.aclosing(execution.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            if self._running.get(key) is execution:
                del self._running[key]

    @answers(EndCommand)
    async def end(self, asked: EndCommand, caller: Caller) -> None:
        if (execution := self._running.get(asked.key)) is None:
            raise NotFound("this command has ended already")
        execution.cancel()

    def end_all(self) -> None:
        for execution in self._running.values():
            execution.cancel()


@dataclass(slots=True)
class Execution:
    """Frames for the client: OUT and ERR by the node's index, one RESULT or ERROR for each node."""

    nodes: Sequence[Node]
    command: Command
    connect_timeout_s: float
    _streams: dict[int, Stream] = field(default_factory=dict)
    _pumps: list[asyncio.Task[None]] = field(default_factory=list)
    _queue: asyncio.Queue[wire.Frame] = field(default_factory=asyncio.Queue)
    # Bounds the output in the queue: a client that does not read holds the nodes back. Exit records always get in.
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_QUEUED_CHUNKS))

    async def frames(self) -> AsyncGenerator[bytes]:
        yield wire.message(wire.CALL, 0, {"nodes": [node.spec.name for node in self.nodes]})
        self._pumps += [self._start(index, node) for index, node in enumerate(self.nodes)]
        left = len(self._pumps)
        try:
            while left:
                kind, index, payload = await self._queue.get()
                if kind == _END:
                    left -= 1
                    self._raise_if_crashed(index)
                    continue
                if kind in (wire.OUT, wire.ERR):
                    self._slots.release()
                yield wire.frame(kind, index, payload)
        finally:
            self.cancel()
            for pump in self._pumps:
                pump.cancel()

    def cancel(self) -> None:
        """Ends the command on all nodes; each still reports how it ended. Where it has not started, it will not."""
        for index, pump in enumerate(self._pumps):
            if (stream := self._streams.get(index)) is not None:
                stream.ask_to_stop()
            else:
                pump.cancel()

    def _start(self, index: int, node: Node) -> asyncio.Task[None]:
        pump = asyncio.create_task(self._pump(index, node), name=f"exec on {node.spec.name}")
        pump.add_done_callback(lambda done: self._end(index, done))
        return pump

    async def _pump(self, index: int, node: Node) -> None:
        try:
            link = await node.ready(self.connect_timeout_s)
            stream = self._streams[index] = link.stream(*self._asked(node))
            async for kind, payload in stream:
                await self._slots.acquire()
                self._queue.put_nowait((kind, index, payload))
            ended = decode(Exit, await stream.result())
            self._queue.put_nowait((wire.RESULT, index, dumps(ended).encode()))
        except DecodeError as error:
            problem = f"invalid exit report from node: {error}"
            self._fail(index, RemoteFailure(problem, subject=node.spec.name))
        except UgroError as error:
            self._fail(index, error)

    def _end(self, index: int, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():
            self._fail(index, UgroError("was cancelled before it started", subject=self.nodes[index].spec.name))
        self._queue.put_nowait((_END, index, b""))

    def _fail(self, index: int, error: UgroError) -> None:
        self._queue.put_nowait((wire.ERROR, index, dumps(error.to_wire()).encode()))

    def _raise_if_crashed(self, index: int) -> None:
        if not self._pumps[index].cancelled():
            self._pumps[index].result()

    def _asked(self, node: Node) -> tuple[str, dict[str, Any]]:
        of, marker = self.command, f"{node.spec.name}.{secrets.token_hex(6)}"
        return asked_of(execute, argv=list(of.argv), cwd=of.cwd, env=dict(of.env), grace_s=of.grace_s, marker=marker)
