"""The agent's side of a service's door: asks its program, on whatever node that runs, over the node's link.

A node is not trusted: what its door says is bounded and typed here.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from ugro.core.door import DoorStats, Latency, NewServer, Pace, Server, ServerState, ServerStats
from ugro.core.errors import NotAllowed, RemoteFailure, TimedOut, UgroError, UsageError
from ugro.nodes import tunnels
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity
from ugro.nodes.tunnels import SocketTarget
from ugro.remote import foreign

SOCKET = "door/control"  # in the run directory
_ANSWER_S = 30.0
_MOST_ANSWER = 4 << 20
_MOST_TEXT = 500
T = TypeVar("T")

Ask = Callable[[bytes], Awaitable[bytes]]  # a line to the door's program; its answer


def over_link(node: Node, identity: Identity, job: int, attempt: int, *, ready_s: float) -> Ask:
    """To the door that is this attempt of this job."""

    async def ask(line: bytes) -> bytes:
        target = SocketTarget(job, attempt, SOCKET)
        duplex = await tunnels.connect(node, identity, target, ready_s=ready_s)
        try:
            await duplex.send(line)
            duplex.end()
            answer = bytearray()
            async for _, piece in duplex:
                if not piece:
                    break
                answer += piece
                if len(answer) > _MOST_ANSWER:
                    raise RemoteFailure("the door says too much", subject=node.spec.name, cause="invalid")
            return bytes(answer)
        finally:
            duplex.cancel()

    return ask


class DoorClient:
    """Implements ``core.door.Door``."""

    def __init__(self, ask: Ask, name: str) -> None:
        self._ask = ask
        self._name = name  # of the service, for errors

    async def servers(self) -> dict[str, Server]:
        found = await self._do("servers")
        return self._parsed(lambda: {str(name): _server(one) for name, one in dict(found).items()})

    async def add(self, server: NewServer) -> None:
        await self._do("add", **asdict(server))

    async def set_weight(self, name: str, weight: int) -> None:
        await self._do("weight", name=name, weight=weight)

    async def drain(self, name: str) -> None:
        await self._do("drain", name=name)

    async def ready(self, name: str) -> None:
        await self._do("ready", name=name)

    async def remove(self, name: str) -> None:
        await self._do("remove", name=name)

    async def share_canary(self, share: float) -> None:
        await self._do("share", share=share)

    async def set_keys(self, keys: Mapping[str, str]) -> None:
        await self._do("keys", keys=dict(keys))

    async def stats(self) -> DoorStats:
        found = await self._do("stats")
        return self._parsed(lambda: _stats(found))

    async def _do(self, verb: str, **more: object) -> Any:
        line = json.dumps({"do": verb, **more}).encode() + b"\n"
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._ask(line)
        except TimeoutError as error:
            raise TimedOut(f"the door did not answer within {_ANSWER_S:g} s", subject=self._name) from error
        found = self._parsed(lambda: dict(foreign.parsed(answer)))
        if "error" in found:
            raise self._error(str(found.get("kind")), str(found["error"])[:_MOST_TEXT])
        return found.get("result")

    def _parsed(self, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise RemoteFailure("the door's answer is invalid", subject=self._name, cause="invalid") from error

    def _error(self, kind: str, text: str) -> UgroError:
        if kind == "busy":
            return NotAllowed(text, subject=self._name)
        if kind == "invalid":
            return UsageError(text, subject=self._name)
        return RemoteFailure(f"the door: {text}", subject=self._name, cause="failed")


def _server(found: Mapping[str, Any]) -> Server:
    return Server(
        name=str(found["name"])[:_MOST_TEXT],
        address=str(found["address"])[:_MOST_TEXT],
        port=int(found["port"]),
        weight=int(found["weight"]),
        state=ServerState(found["state"]),
        sessions=int(found["sessions"]),
        queued=int(found["queued"]),
        limit=int(found["limit"]),
        canary=bool(found["canary"]),
    )


def _stats(found: Mapping[str, Any]) -> DoorStats:
    return DoorStats(
        requests=int(found["requests"]),
        errors=int(found["errors"]),
        denied=int(found["denied"]),
        sessions=int(found["sessions"]),
        queued=int(found["queued"]),
        held=int(found["held"]),
        latency=_latency(found["latency"]),
        window_s=_finite(found["window_s"]),
        sampled_share=_finite(found["sampled_share"]),
        started_at=_finite(found["started_at"]),
        servers={str(name): _server_stats(one) for name, one in dict(found["servers"]).items()},
    )


def _server_stats(found: Mapping[str, Any]) -> ServerStats:
    return ServerStats(
        requests=int(found["requests"]),
        errors=int(found["errors"]),
        retries=int(found["retries"]),
        sessions=int(found["sessions"]),
        queued=int(found["queued"]),
        latency=_latency(found["latency"]),
        pace=Pace(**{one.name: _finite(found["pace"].get(one.name, 0)) for one in fields(Pace)}),
    )


def _latency(found: Mapping[str, Any]) -> Latency:
    mean_s, p50_s, p90_s, p99_s = (_finite(found.get(name, 0)) for name in ("mean_s", "p50_s", "p90_s", "p99_s"))
    return Latency(int(found.get("count", 0)), mean_s, p50_s, p90_s, p99_s)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not a number")
    return number
