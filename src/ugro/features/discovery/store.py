"""Nodes that joined by themselves, and the drains of those that have left their source.

A drain that a person asked for is never replaced or undone here. The drain of a removed node stays until the name is
used again or the agent starts: a scheduler that chose the node a moment ago must still find it drained.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from ugro.features.discovery.model import Candidate, Member
from ugro.kernel.jobs.rows import placement_of
from ugro.kernel.store.connection import Connection
from ugro.kernel.store.engine import Database
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import DecodeError, decode, dumps

log = logging.getLogger(__name__)

_UNDRAIN = "DELETE FROM drained_nodes WHERE name = ? AND drained_by = 'discovery'"


class DiscoveredStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> list[Member]:
        """For the start of an agent: no decision of a scheduler is under way, so old drains can go."""
        return await self._database.run(_open)

    async def put(self, candidate: Candidate) -> None:
        """It joins, is back, or has other fields: its source lists it now."""
        await self._database.run(lambda db: _put(db, candidate))

    async def leave(self, name: str, reason: str) -> None:
        await self._database.run(lambda db: _leave(db, name, reason))

    async def remove(self, name: str) -> bool:
        """False if a job holds something there, or if it is back: it stays."""
        return await self._database.run(lambda db: _remove(db, name))

    async def hand_over(self, names: Iterable[str]) -> None:
        """The cluster file lists these names: they are its nodes."""
        listed = list(names)
        await self._database.run(lambda db: _hand_over(db, listed))

    async def busy(self) -> set[str]:
        """The nodes on which jobs hold something."""
        query = "SELECT DISTINCT node FROM held_devices"
        return await self._database.run(lambda db: {str(row["node"]) for row in db.execute(query)})

    async def unkept(self) -> set[str]:
        """The nodes that jobs have used which are over, and whose last checkpoints are not all here."""
        query = "SELECT placement FROM attempts WHERE job IN (SELECT job FROM to_keep)"
        rows = await self._database.run(lambda db: db.execute(query).fetchall())
        return {node for row in rows for node in placement_of(row["placement"]).nodes}


def _open(db: Connection) -> list[Member]:
    db.execute(
        "DELETE FROM drained_nodes WHERE drained_by = 'discovery' "
        "AND name NOT IN (SELECT name FROM discovered_nodes WHERE has_left = 1)"
    )
    found: list[Member] = []
    for row in db.execute("SELECT name, candidate, has_left FROM discovered_nodes ORDER BY place, name").fetchall():
        try:
            candidate = decode(Candidate, json.loads(row["candidate"]))
        except (DecodeError, ValueError):  # of another version; its jobs are found by the node's name all the same
            log.error("the record of the node is not readable; its name is its address", extra={"node": row["name"]})
            candidate = Candidate(row["name"], row["name"])
        found.append(Member(candidate, bool(row["has_left"])))
    return found


def _put(db: Connection, candidate: Candidate) -> None:
    query = "SELECT 1 FROM discovered_nodes WHERE name = ? AND has_left = 0"
    if db.execute(query, (candidate.name,)).fetchone() is None:
        _note(db, candidate.name, "node-joined", f"found by {', '.join(candidate.sources)}")
    db.execute(
        "INSERT INTO discovered_nodes (name, candidate, has_left, place) "
        "VALUES (?, ?, 0, (SELECT COALESCE(MAX(place), 0) + 1 FROM discovered_nodes)) "
        "ON CONFLICT (name) DO UPDATE SET candidate = excluded.candidate, has_left = 0",
        (candidate.name, dumps(candidate)),
    )
    db.execute(_UNDRAIN, (candidate.name,))


def _leave(db: Connection, name: str, reason: str) -> None:
    db.execute("UPDATE discovered_nodes SET has_left = 1 WHERE name = ?", (name,))
    db.execute(
        "INSERT INTO drained_nodes (name, reason, drained_at, drained_by) VALUES (?, ?, ?, 'discovery') "
        "ON CONFLICT (name) DO NOTHING",
        (name, reason, clock.now().at),
    )
    _note(db, name, "node-left", f"{reason}; it takes no new jobs")


def _remove(db: Connection, name: str) -> bool:
    if db.execute("SELECT 1 FROM held_devices WHERE node = ?", (name,)).fetchone() is not None:
        return False
    if db.execute("DELETE FROM discovered_nodes WHERE name = ? AND has_left = 1", (name,)).rowcount:
        _note(db, name, "node-removed", "no job uses it any more")
    return db.execute("SELECT 1 FROM discovered_nodes WHERE name = ?", (name,)).fetchone() is None


def _hand_over(db: Connection, names: list[str]) -> None:
    for name in names:
        db.execute("DELETE FROM discovered_nodes WHERE name = ?", (name,))
        db.execute(_UNDRAIN, (name,))


def _note(db: Connection, name: str, kind: str, text: str) -> None:
    db.execute("INSERT INTO events (at, node, kind, text) VALUES (?, ?, ?, ?)", (clock.now().at, name, kind, text))
