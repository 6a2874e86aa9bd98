"""Connections to what listens on one node, over its link."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ugro.core.errors import RemoteFailure, TimedOut
from ugro.core.login import node_of
from ugro.nodes.calls import Duplex
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity

_CONNECT_S = 20.0  # the node program gives up sooner, and says why


@dataclass(frozen=True, slots=True)
class PortTarget:
    """Of the node's loopback."""

    port: int

    def __str__(self) -> str:
        return f"port {self.port}"

    def params(self) -> dict[str, Any]:
        return {"port": self.port}


@dataclass(frozen=True, slots=True)
class SocketTarget:
    """In the run directory of an attempt: a relative path."""

    job: int
    attempt: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of job {self.job}"

    def params(self) -> dict[str, Any]:
        return {"job": str(self.job), "attempt": self.attempt, "socket": self.name}


async def connect(node: Node, identity: Identity, target: PortTarget | SocketTarget, *, ready_s: float) -> Duplex:
    """Open: what listens there has accepted. The caller ends or cancels it."""
    link = await node.ready(ready_s, patiently=True)
    duplex = link.duplex("net.connect", identity.params(**target.params()))
    name = node_of(node.spec.name)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await duplex.opened()
    except TimeoutError as error:
        duplex.cancel()
        raise TimedOut(f"no answer to net.connect within {_CONNECT_S:g} s", subject=name) from error
    except RemoteFailure as error:
        if error.cause != "refused":
            raise
        hint = f"see what listens there: ugro exec {name} -- ss -ltnx"
        raise RemoteFailure(error.message, subject=name, cause=error.cause, hint=hint) from error
    except asyncio.CancelledError:
        duplex.cancel()
        raise
    return duplex
