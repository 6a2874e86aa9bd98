"""Connections that clients have to what listens on nodes: a bounded number, each until one of its ends is gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ugro.agent.ops.audit import AuditLog
from ugro.agent.support.caller import caller
from ugro.agent.tracking.cluster import Cluster
from ugro.core.audit import AuditEntry
from ugro.core.errors import NotAllowed, NotFound, Unreachable
from ugro.core.job import Job
from ugro.core.login import node_of
from ugro.nodes import tunnels
from ugro.nodes.calls import Duplex
from ugro.nodes.runs import Identity
from ugro.nodes.tunnels import PortTarget, SocketTarget

ACTION = "tunnel"
MOST = 256
_MOST_NOTED = 4096


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of a node: one of its loopback ports, or a socket in the run directory of a job that runs there."""

    node: str
    port: int | None = None
    job: str | None = None
    socket: str | None = None

    def __str__(self) -> str:
        return f"{self.node} port {self.port}" if self.port else f"{self.node} {self.socket} of job {self.job}"


class Tunnels:
    def __init__(
        self,
        cluster: Cluster,
        audit: AuditLog,
        identity: Callable[[], Identity],
        find_job: Callable[[str], Awaitable[Job]],
    ) -> None:
        self._cluster = cluster
        self._audit = audit
        self._identity = identity
        self._find_job = find_job
        self._open: set[Duplex] = set()
        self._opening = 0
        self._noted: dict[tuple[str, str, str], None] = {}

    @property
    def count(self) -> int:
        return len(self._open)

    async def open(self, wanted: Wanted) -> Duplex:
        if self.count + self._opening >= MOST:
            raise NotAllowed(f"{MOST} connections to nodes are open, which is the most at once", hint="close some")
        self._cluster.inventory.named(wanted.node)
        through, target = await self._target(wanted)
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

    def note(self, entry: AuditEntry) -> None:
        """The first of a process to the same end: a browser opens hundreds, which would push out all other entries."""
        key = (entry.user, entry.via, f"{entry.subject} {entry.outcome}")
        if key not in self._noted:
            self._noted[key] = None
            if len(self._noted) > _MOST_NOTED:
                del self._noted[next(iter(self._noted))]
            self._audit.note(entry)

    async def _target(self, wanted: Wanted) -> tuple[str, PortTarget | SocketTarget]:
        """And through which login: a job's socket is in its own account."""
        if wanted.port is not None:
            return wanted.node, PortTarget(wanted.port)
        assert wanted.job is not None
        assert wanted.socket is not None
        job = await self._find_job(wanted.job)
        if (asks := caller()) is not None and not asks.may_change(job.user):
            raise NotAllowed(f"job {job.id} is {job.user}'s", hint="its user or an operator can do this")
        through = next((name for name in (job.held.nodes if job.held else ()) if node_of(name) == wanted.node), None)
        if through is None:
            raise NotFound(f"job {job.id} does not run on {wanted.node}", hint=f"see: ugro status {job.id}")
        return through, SocketTarget(job.id, job.attempt, wanted.socket)
