"""Connections to what listens on one node, over its link."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ugro.kernel.access.caller import caller
from ugro.kernel.access.model import Role, node_of
from ugro.kernel.jobs.model import Job
from ugro.kernel.links.calls import Duplex
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.support.errors import NotAllowed, NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.node import net

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
    duplex = link.duplex(*identity.asks(net.connect, **target.params()))
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


# --- connections of clients -------------------------------------------------------------------------------------------
# There is a bounded number of them. Each lasts until one of its ends is gone.


MOST = 256
MOST_OF_NODE = 48  # of the 64 that its link carries: the agent's own, to services and replicas, always find room
MOST_OF_USER = 16  # of them, for others than the owner
LoginFor = Callable[[Node, str], str]  # the name of a user's login on a node, or of the node


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of a node: one of its loopback ports, or a socket in the run directory of a job that runs there."""

    node: str
    port: int | None = None
    job: str | None = None
    socket: str | None = None


class Tunnels:
    def __init__(
        self, cluster: Cluster, identity: Identity, find_job: Callable[[str], Awaitable[Job]], login_for: LoginFor
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._find_job = find_job
        self._login_for = login_for
        self._open: dict[Duplex, tuple[str, str]] = {}  # to which node, and for whom
        self._taken: Counter[tuple[str, str]] = Counter()  # also by those that are being opened

    @property
    def count(self) -> int:
        return len(self._open)

    async def open(self, wanted: Wanted, *, is_chosen_here: bool = False) -> Duplex:
        """``is_chosen_here``: the agent has chosen the port, of something that the caller may use."""
        named = self._cluster.inventory.named(wanted.node)
        if wanted.port is not None:
            node = named if is_chosen_here else self._own_login(named)
            target: PortTarget | SocketTarget = PortTarget(wanted.port)
        else:
            through, target = await self._socket(wanted)
            node = self._cluster.inventory.get(through)
        # A node that is connecting for the first time gets the time a connection may take.
        ready_s = 2 * self._cluster.config.ssh.connect_timeout
        taker = self._take(named.spec.name)
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self._give_back, taker)
            duplex = await connect(node, self._identity, target, ready_s=ready_s)
            unless_open.pop_all()
        self._open[duplex] = taker
        return duplex

    def _take(self, node: str) -> tuple[str, str]:
        """Raises NotAllowed if there is no room for one more of the caller's."""
        asks = caller()
        taker = (node, asks.user if asks is not None else "")
        close = "close some"
        if self._taken.total() >= MOST:
            raise NotAllowed(f"{MOST} connections to nodes are open, which is the most at once", hint=close)
        if sum(count for (name, _), count in self._taken.items() if name == node) >= MOST_OF_NODE:
            raise NotAllowed(f"{MOST_OF_NODE} connections to {node} are open, which is the most at once", hint=close)
        if asks is not None and not asks.shares_account and self._taken[taker] >= MOST_OF_USER:
            text = f"you have {MOST_OF_USER} connections to {node}, which is the most at once"
            raise NotAllowed(text, hint=close)
        self._taken[taker] += 1
        return taker

    def _give_back(self, taker: tuple[str, str]) -> None:
        self._taken[taker] -= 1
        self._taken += Counter()  # without those that have none

    def close(self, duplex: Duplex) -> None:
        duplex.cancel()
        if (taker := self._open.pop(duplex, None)) is not None:
            self._give_back(taker)

    def close_all(self) -> None:
        for duplex in self._open:
            duplex.cancel(Unreachable("the agent stops", cause="closed"))

    def _own_login(self, node: Node) -> Node:
        """Where jobs run in the accounts of their users, a user gets as far as a job of theirs would.

        No login is opened for it: somebody without an account there could have the agent fail to log in all day.
        """
        asks = caller()
        if asks is None or asks.role.covers(Role.OPERATOR):
            return node
        name = self._login_for(node, asks.user)
        if name == node.spec.name:
            return node
        login = self._cluster.inventory.find(name)
        if login is None:
            hint = "it opens when a job of yours waits or runs there; an operator connects without it"
            raise NotAllowed(f"{node.spec.name} has no open login of {asks.user}'s", hint=hint)
        if login.link is None and login.error is not None:
            raise login.error.with_traceback(None)
        return login

    async def _socket(self, wanted: Wanted) -> tuple[str, SocketTarget]:
        """And through which login: a job's socket is in its own account."""
        assert wanted.job is not None
        assert wanted.socket is not None
        job = await self._find_job(wanted.job)
        if (asks := caller()) is not None and not asks.may_change(job.user):
            raise NotAllowed(f"job {job.id} is {job.user}'s", hint="its user or an operator can do this")
        through = next((name for name in (job.held.nodes if job.held else ()) if node_of(name) == wanted.node), None)
        if through is None:
            raise NotFound(f"job {job.id} does not run on {wanted.node}", hint=f"see: ugro status {job.id}")
        return through, SocketTarget(job.id, job.attempt, wanted.socket)
