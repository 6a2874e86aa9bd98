"""`ugro exec`: one command on several nodes at once, their output interleaved as it comes.

Nothing is kept: it ends with the client that asked for it. Jobs that outlive their terminal are not this.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.core.codec import dumps
from ugro.core.errors import UgroError
from ugro.nodes.calls import Stream
from ugro.nodes.node import Node
from ugro.remote import wire

_QUEUED_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]
    cwd: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    grace_s: float = 5.0


@dataclass(slots=True)
class Execution:
    """Frames for the client: OUT and ERR by the node's index, one RESULT or ERROR for each node."""

    nodes: Sequence[Node]
    command: Command
    connect_timeout_s: float
    _streams: dict[int, Stream] = field(default_factory=dict)
    _is_cancelled: bool = False

    async def frames(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[wire.Frame] = asyncio.Queue(_QUEUED_CHUNKS)
        yield wire.message(wire.CALL, 0, {"nodes": [node.spec.name for node in self.nodes]})
        pumps = [
            asyncio.create_task(self._pump(index, node, queue), name=f"exec on {node.spec.name}")
            for index, node in enumerate(self.nodes)
        ]
        try:
            left = len(pumps)
            while left:
                kind, index, payload = await queue.get()
                left -= kind in (wire.RESULT, wire.ERROR)
                yield wire.frame(kind, index, payload)
        finally:
            self.cancel()
            for pump in pumps:
                pump.cancel()

    def cancel(self) -> None:
        """Ends the command everywhere; each node still reports how it ended."""
        self._is_cancelled = True
        for stream in self._streams.values():
            stream.ask_to_stop()

    async def _pump(self, index: int, node: Node, queue: asyncio.Queue[wire.Frame]) -> None:
        try:
            link = await node.ready(self.connect_timeout_s)
            stream = self._streams[index] = link.stream("exec", self._params(node))
            if self._is_cancelled:
                stream.ask_to_stop()
            async for kind, payload in stream:
                await queue.put((kind, index, payload))
            await queue.put((wire.RESULT, index, dumps(await stream.result()).encode()))
        except UgroError as error:
            await queue.put((wire.ERROR, index, dumps(error.to_wire()).encode()))
        finally:
            self._streams.pop(index, None)

    def _params(self, node: Node) -> dict[str, Any]:
        return {
            "argv": self.command.argv,
            "cwd": self.command.cwd,
            "env": dict(self.command.env),
            "grace_s": self.command.grace_s,
            "marker": f"{node.spec.name}.{secrets.token_hex(6)}",
        }
