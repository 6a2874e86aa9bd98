"""What the state says about itself: its generation, the ids that it gave, and whether it is known to be old.

Ids are reserved in blocks. The end of the block is what marks outside the state carry: it changes rarely, and an id
that was given stays above no mark, so no later state gives it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ugro.features.safe_mode import store as adoption
from ugro.features.safe_mode.rules import Change, Gap, Ids
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import FINAL_STATES, HOLDING_STATES, Job
from ugro.kernel.jobs.rows import placement_of
from ugro.kernel.store.connection import Connection
from ugro.kernel.store.engine import Database
from ugro.kernel.support.codec import DecodeError

BLOCK = 1000
AHEAD = BLOCK // 2  # a new block is reserved while so many ids are left, so that nodes hear of it in time


@dataclass(frozen=True, slots=True)
class Numbers:
    """``reserved``: ids up to this one may have been given; 0: this state was never told from an older one."""

    generation: int
    highest: int
    reserved: int
    gaps: tuple[Gap, ...] = ()

    @property
    def ids(self) -> Ids:
        return Ids(self.highest, self.gaps)


@dataclass(frozen=True, slots=True)
class Decision:
    """How the user ends safe mode: the changes of jobs, and numbers above all that were ever seen."""

    changes: tuple[Change, ...]
    generation: int
    ids: int
    is_forgotten: bool
    text: str


class StandingStore:
    def __init__(self, database: Database, on_change: Callable[[Job], None]) -> None:
        self._database = database
        self._on_change = on_change
        self._reserved = 0  # used by the database's thread only; never more than what the state says

    async def numbers(self) -> Numbers:
        return await self._database.run(numbers)

    async def reserve(self, ids: int = 0) -> Numbers:
        """Ids begin above ``ids`` from now on, in a new block."""
        return await self._database.run(lambda db: _reserve(db, ids))

    def keep_reserved(self, db: Connection, job: int) -> None:
        """In the transaction of each new job: reserves more ids when few are left."""
        if job + AHEAD > self._reserved:
            # What is written now may be rolled back yet: it counts when it is read with the next job.
            self._reserved = int(_get(db, "ids_reserved") or 0)
            if job + AHEAD > self._reserved:
                _put(db, "ids_reserved", str(job + BLOCK))

    async def safe_mode(self) -> str | None:
        """A document that says why the agent is in safe mode; None: it is not."""
        return await self._database.run(lambda db: _get(db, "safe_mode"))

    async def enter(self, document: str, text: str | None) -> None:
        """``text``: of the event, if this is news."""

        def work(db: Connection) -> None:
            _put(db, "safe_mode", document)
            if text is not None:
                adoption.note(db, "safe mode", text)

        await self._database.run(work)

    async def leave(self, text: str) -> None:
        """It has turned out that nothing is newer."""

        def work(db: Connection) -> None:
            db.execute("DELETE FROM meta WHERE key = 'safe_mode'")
            adoption.note(db, "safe mode", text)

        await self._database.run(work)

    async def is_elsewhere(self, place: str) -> bool:
        """Whether the state was last used in another place."""
        return await self._database.run(lambda db: _get(db, "place") not in (None, place))

    async def settle(self, place: str) -> None:
        """It is used here from now on."""
        await self._database.run(lambda db: _put(db, "place", place))

    async def nodes(self) -> frozenset[str]:
        """Nodes that may know what became of its jobs: those of its cluster, and those that hold some.

        None of a state whose jobs have all ended: nothing of it could run again.
        """
        return await self._database.run(_nodes)

    async def keep_nodes(self, names: Collection[str]) -> None:
        """These are in its cluster now."""
        await self._database.run(lambda db: _put(db, "nodes", json.dumps(sorted(names))))

    async def raise_generation(self, generation: int) -> None:
        await self._database.run(lambda db: _raise_generation(db, generation))

    async def decide(self, decision: Decision) -> list[Job]:
        """Ends safe mode in one transaction: after a crash all of it holds, or nothing. Returns the changed jobs."""

        def notify(jobs: Iterable[Job]) -> None:
            for job in jobs:
                self._on_change(job)

        return await self._database.run(lambda db: _decide(db, decision), then=notify)


def numbers(db: Connection) -> Numbers:
    gaps = json.loads(_get(db, "unknown_ids") or "[]")
    return Numbers(
        int(_get(db, "generation") or 0),
        db.newest_id("jobs"),
        int(_get(db, "ids_reserved") or 0),
        tuple((int(first), int(last)) for first, last in gaps),
    )


def _decide(db: Connection, decision: Decision) -> list[Job]:
    before = numbers(db)
    changed = adoption.apply(db, decision.changes)
    after = _reserve(db, decision.ids)
    gaps = before.gaps
    if after.highest > before.highest:
        gaps = (*gaps, (before.highest + 1, after.highest))
    # What is forgotten counts as given: a node that comes back with it later has it cleared away.
    _put(db, "unknown_ids", json.dumps([] if decision.is_forgotten else gaps))
    _raise_generation(db, decision.generation)
    db.execute("DELETE FROM meta WHERE key = 'safe_mode'")
    adoption.note(db, "safe mode", decision.text)
    return changed


def _nodes(db: Connection) -> frozenset[str]:
    final, holding = sorted(FINAL_STATES), sorted(HOLDING_STATES)
    marks = ",".join("?" * len(final))
    if db.execute(f"SELECT 1 FROM jobs WHERE state NOT IN ({marks}) LIMIT 1", final).fetchone() is None:
        return frozenset()
    kept = _get(db, "nodes")
    if kept is None:  # of a version that did not keep them
        rows = db.execute("SELECT DISTINCT placement FROM attempts")
    else:
        marks = ",".join("?" * len(holding))
        rows = db.execute(f"SELECT placement FROM jobs WHERE placement IS NOT NULL AND state IN ({marks})", holding)
    return frozenset(json.loads(kept or "[]")).union(*(_placed_on(row["placement"]) for row in rows))


def _placed_on(placement: str) -> set[str]:
    """A placement that cannot be read names no node."""
    try:
        return {node_of(node) for node in placement_of(placement).nodes}
    except (DecodeError, ValueError):
        return set()


def _raise_generation(db: Connection, generation: int) -> None:
    _put(db, "generation", str(max(numbers(db).generation, generation)))


def _reserve(db: Connection, ids: int) -> Numbers:
    known = numbers(db)
    highest = max(ids, known.highest)
    if highest > known.highest:
        db.raise_ids("jobs", highest)
    if highest + AHEAD > known.reserved:
        _put(db, "ids_reserved", str(highest + BLOCK))
    return numbers(db)


def _get(db: Connection, key: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row["value"]) if row is not None else None


def _put(db: Connection, key: str, value: str) -> None:
    query = "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    db.execute(query, (key, value))
