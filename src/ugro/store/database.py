"""The agent's state, in SQLite or PostgreSQL. Stores return the types of ``core``; SQL stays in this package.

Only the agent writes to it, and every change is durable before it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from ugro.core.errors import Damaged, StoreAway
from ugro.store.alerts import AlertStore
from ugro.store.audit import AuditStore
from ugro.store.backend import Backend
from ugro.store.clock import ClockStore
from ugro.store.code import CodeStore
from ugro.store.connection import Connection
from ugro.store.discovered import DiscoveredStore
from ugro.store.ends import EndStore
from ugro.store.engine import Database, Opening
from ugro.store.environments import EnvironmentStore
from ugro.store.hardware import HardwareStore
from ugro.store.hooks import HookStore
from ugro.store.jobs import JobStore
from ugro.store.listing import ListingStore
from ugro.store.logins import LoginStore
from ugro.store.notes import NoteStore
from ugro.store.power import PowerStore
from ugro.store.python_envs import PythonEnvStore
from ugro.store.ray_clusters import RayClusterStore
from ugro.store.reserve import Reserve
from ugro.store.retention import RetentionStore
from ugro.store.services import ServiceStore
from ugro.store.sweeps import SweepStore
from ugro.store.tokens import TokenStore
from ugro.store.trials import TrialStore
from ugro.store.visibility import VisibilityStore


class Store:
    def __init__(self, at: Path | Backend, reserve: Reserve | None = None) -> None:
        self._database = Database(at, reserve=reserve)
        self.jobs = JobStore(self._database)
        self.code = CodeStore(self._database)
        self.discovered = DiscoveredStore(self._database)
        self.environments = EnvironmentStore(self._database)
        self.python_envs = PythonEnvStore(self._database)
        self.hardware = HardwareStore(self._database)
        self.alerts = AlertStore(self._database)
        self.clock = ClockStore(self._database)
        self.ends = EndStore(self._database)
        self.notes = NoteStore(self._database)
        self.listing = ListingStore(self._database)
        self.audit = AuditStore(self._database)
        self.retention = RetentionStore(self._database)
        self.trials = TrialStore(self._database)
        self.sweeps = SweepStore(self._database)
        self.ray_clusters = RayClusterStore(self._database)
        self.services = ServiceStore(self._database)
        self.power = PowerStore(self._database)
        self.hooks = HookStore(self._database)
        self.tokens = TokenStore(self._database)
        self.visibility = VisibilityStore(self._database)
        self.usage = self.jobs.usage
        self.logins = LoginStore(self._database)

    async def open(self, opening: Opening | None = None) -> None:
        await self._database.open(opening)

    @property
    def damage(self) -> Damaged | None:
        """Set once damage is found while the state is in use; from then on every call raises it."""
        return self._database.damage

    @property
    def name(self) -> str:
        return self._database.name

    @property
    def away(self) -> StoreAway | None:
        """Set while its server does not answer: who asks the store waits."""
        return self._database.problem

    def give_up(self) -> None:
        """Nobody is to wait for a server that does not answer any longer."""
        self._database.give_up()

    def refuse(self, what: str) -> None:
        self._database.refuse(what)

    def advise_with(self, advise: Callable[[], str | None]) -> None:
        """``advise`` gives the hint of the error about damage."""
        self._database.advise = advise

    @property
    def changes(self) -> int:
        """Grows with every change."""
        return self._database.changes

    async def close(self) -> None:
        await self._database.close()

    async def next_generation(self) -> int:
        """The number of this agent process: a node refuses an agent with a lower number than it has seen."""
        return await self._database.run(_next_generation)

    async def agent_id(self) -> str:
        """The id of this state directory. Nodes use it to keep the runs of different agents apart."""
        return await self._database.run(_agent_id)

    async def drain(self, node: str, reason: str) -> None:
        """By a person: stays until a person resumes it."""
        await self._database.run(
            lambda db: db.execute(
                "INSERT INTO drained_nodes (name, reason, drained_at, drained_by) VALUES (?, ?, ?, 'person') "
                "ON CONFLICT (name) DO UPDATE SET reason = excluded.reason, drained_at = excluded.drained_at, "
                "drained_by = excluded.drained_by",
                (node, reason, datetime.now(UTC).isoformat()),
            )
        )

    async def resume(self, node: str) -> None:
        await self._database.run(lambda db: db.execute("DELETE FROM drained_nodes WHERE name = ?", (node,)))

    async def drained(self) -> dict[str, str]:
        """The drained nodes, and the reason given for each."""
        query = "SELECT name, reason FROM drained_nodes"
        return await self._database.run(lambda db: {row["name"]: row["reason"] for row in db.execute(query)})


def _next_generation(db: Connection) -> int:
    db.execute(
        "INSERT INTO meta (key, value) VALUES ('generation', '1') "
        "ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(meta.value AS INTEGER) + 1 AS TEXT)"
    )
    return int(db.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()["value"])


def _agent_id(db: Connection) -> str:
    db.execute("INSERT INTO meta (key, value) VALUES ('agent_id', ?) ON CONFLICT (key) DO NOTHING", (uuid4().hex,))
    return str(db.execute("SELECT value FROM meta WHERE key = 'agent_id'").fetchone()["value"])
