"""Connections that clients have to what listens on nodes: a bounded number, each until one of its ends is gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ugro.agent.support.caller import caller
from ugro.agent.tracking.cluster import Cluster
from ugro.core.errors import NotAllowed, NotFound, Unreachable
from ugro.core.identity import Role
from ugro.core.job import Job
from ugro.core.login import node_of
from ugro.nodes import tunnels
from ugro.nodes.calls import Duplex
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity
from ugro.nodes.tunnels import PortTarget, SocketTarget

MOST = 256
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
        self,
        cluster: Cluster,
        identity: Callable[[], Identity],
        find_job: Callable[[str], Awaitable[Job]],
        login_for: LoginFor,
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._find_job = find_job
        self._login_for = login_for
        self._open: set[Duplex] = set()
        self._opening = 0

    @property
    def count(self) -> int:
        return len(self._open)

    async def open(self, wanted: Wanted, *, is_chosen_here: bool = False) -> Duplex:
        """``is_chosen_here``: the agent has chosen the port, of something that the caller may use."""
        if self.count + self._opening >= MOST:
            raise NotAllowed(f"{MOST} connections to nodes are open, which is the most at once", hint="close some")
        named = self._cluster.inventory.named(wanted.node)
        if wanted.port is not None:
            node = named if is_chosen_here else self._own_login(named)
            target: PortTarget | SocketTarget = PortTarget(wanted.port)
        else:
            through, target = await self._socket(wanted)
            node = self._cluster.inventory.get(through)
        # A node that is connecting for the first time gets the time a connection may take.
        ready_s = 2 * self._cluster.config.ssh.connect_timeout
        self._opening += 1
        try:
            duplex = await tunnels.connect(node, self._identity(), target, ready_s=ready_s)
        finally:
            self._opening -= 1
        self._open.add(duplex)
        return duplex

    def close(self, duplex: Duplex) -> None:
        duplex.cancel()
        self._open.discard(duplex)

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
