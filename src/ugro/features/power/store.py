"""Nodes that sleep, on disk: where each stands, and what is known of it while it cannot be asked."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TypeVar

from ugro.features.power.model import PowerRecord
from ugro.features.power.node.wake import Interface
from ugro.kernel.links.model import Facts, Machine
from ugro.kernel.store.connection import Connection
from ugro.kernel.store.engine import Database
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import DecodeError, decode, dumps

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Known:
    """What a node was when it was last awake."""

    machine: Machine | None = None
    facts: Facts | None = None
    interface: Interface | None = None


class PowerStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> dict[str, tuple[PowerRecord, Known]]:
        rows = await self._database.run(lambda db: db.execute("SELECT * FROM node_power").fetchall())
        found = {}
        for row in rows:
            record = _decoded(PowerRecord, row["record"], row["name"])
            if record is not None:
                known = Known(
                    _decoded(Machine, row["machine"], row["name"]),
                    _decoded(Facts, row["facts"], row["name"]),
                    _decoded(Interface, row["interface"], row["name"]),
                )
                found[str(row["name"])] = (record, known)
        return found

    async def put(self, name: str, record: PowerRecord, event: str) -> None:
        """With its event, in one transaction."""
        await self._database.run(lambda db: _put(db, name, record, event))

    async def learn(self, name: str, record: PowerRecord, known: Known) -> None:
        """``record`` is used if there is none yet."""
        await self._database.run(lambda db: _learn(db, name, record, known))

    async def forget(self, name: str) -> None:
        await self._database.run(lambda db: db.execute("DELETE FROM node_power WHERE name = ?", (name,)))


def _put(db: Connection, name: str, record: PowerRecord, event: str) -> None:
    db.execute(
        "INSERT INTO node_power (name, record) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET record = excluded.record",
        (name, dumps(record)),
    )
    db.execute("INSERT INTO events (at, node, kind, text) VALUES (?, ?, 'power', ?)", (clock.now().at, name, event))


def _learn(db: Connection, name: str, record: PowerRecord, known: Known) -> None:
    found = (dumps(one) if one is not None else None for one in (known.machine, known.facts, known.interface))
    db.execute(
        "INSERT INTO node_power (name, record, machine, facts, interface) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET machine = coalesce(excluded.machine, node_power.machine), "
        "facts = coalesce(excluded.facts, node_power.facts), "
        "interface = coalesce(excluded.interface, node_power.interface)",
        (name, dumps(record), *found),
    )


def _decoded(kind: type[T], text: str | None, name: str) -> T | None:
    if text is None:
        return None
    try:
        return decode(kind, json.loads(text))
    except (DecodeError, ValueError) as error:  # of another version: it is learned again when the node is awake
        log.error("what was known of it cannot be read: %s", error, extra={"node": name})
        return None
