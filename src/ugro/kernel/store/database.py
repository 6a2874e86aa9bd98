"""The agent's state, in SQLite or PostgreSQL. Stores return the nouns of their rooms' ``model``.

Only the agent writes to it, and every change is durable before it is acknowledged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from ugro.features.alerts.store import AlertStore
from ugro.features.discovery.store import DiscoveredStore
from ugro.features.environments.store import EnvironmentStore, PythonEnvStore
from ugro.features.experiments.store import NoteStore
from ugro.features.hardware.store import HardwareStore
from ugro.features.hooks.store import HookStore
from ugro.features.planning.store import TrialStore
from ugro.features.power.store import PowerStore
from ugro.features.ray.store import RayClusterStore
from ugro.features.retention.store import RetentionStore
from ugro.features.services.store import ServiceStore
from ugro.features.sweeps.store import SweepStore
from ugro.kernel.access.store import AuditStore, TokenStore
from ugro.kernel.agent.rules import Memory
from ugro.kernel.jobs.moves import LoginStore
from ugro.kernel.jobs.rows import ListingStore, VisibilityStore
from ugro.kernel.jobs.store import EndStore, JobStore
from ugro.kernel.store.connection import Backend, Connection
from ugro.kernel.store.engine import Database, Opening, Reserve
from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import Damaged, StoreAway

# --- what is known about this machine's clock -------------------------------------------------------------------------
# It is kept for the next agent.


_KEY = "clock"


class ClockStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self) -> Memory | None:
        return await self._database.run(_read)

    async def write(self, memory: Memory) -> None:
        query = "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        await self._database.run(lambda db: db.execute(query, (_KEY, dumps(memory))), counts=False)


def _read(db: Connection) -> Memory | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (_KEY,)).fetchone()
    try:
        return decode(Memory, json.loads(row["value"])) if row is not None else None
    except (DecodeError, ValueError):  # of another version
        return None


# --- which code was sent to which node --------------------------------------------------------------------------------
# The last snapshot on a node tells what the next one lacks there.


class CodeStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def sent(self, node: str, folder: str, snapshot: str) -> None:
        await self._database.run(
            lambda db: db.execute(
                "INSERT INTO sent_code (node, folder, snapshot, sent_at) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (node, folder) DO UPDATE SET snapshot = excluded.snapshot, sent_at = excluded.sent_at",
                (node, _text(folder), snapshot, datetime.now(UTC).isoformat()),
            )
        )

    async def last(self, node: str, folder: str) -> str | None:
        """The last snapshot on the node, of this folder if there is one."""
        query = "SELECT snapshot FROM sent_code WHERE node = ? ORDER BY folder = ? DESC, sent_at DESC LIMIT 1"
        row = await self._database.run(lambda db: db.execute(query, (node, _text(folder))).fetchone())
        return str(row["snapshot"]) if row else None

    async def taken(self, folder: str, snapshot: str) -> None:
        await self._database.run(
            lambda db: db.execute(
                "INSERT INTO snapshots (id, folder, taken_at) VALUES (?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET folder = excluded.folder, taken_at = excluded.taken_at",
                (snapshot, _text(folder), datetime.now(UTC).isoformat()),
            )
        )

    async def folder_of(self, snapshot: str) -> str:
        query = "SELECT folder FROM snapshots WHERE id = ?"
        row = await self._database.run(lambda db: db.execute(query, (snapshot,)).fetchone())
        return str(row["folder"]) if row else ""


def _text(folder: str) -> str:
    """The name of a folder need not be UTF-8, as texts in the database are."""
    return folder.encode("utf-8", "backslashreplace").decode()


# --- the store --------------------------------------------------------------------------------------------------------


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
