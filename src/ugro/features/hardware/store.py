"""What ``ugro node bench`` measured: the newest figures of nodes, links and all-reduces, and earlier ones of nodes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ugro.features.hardware.model import AllReduceFigures, BestFigure, LinkFigures, Measurement, NodeFigures
from ugro.kernel.store.connection import Connection, Row
from ugro.kernel.store.engine import Database
from ugro.kernel.support.codec import decode, dumps

KEPT_RUNS = 30  # of a node
_KEPT_SETS = 100  # of nodes that all-reduces were measured on
T = TypeVar("T")


class HardwareStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, measured: Measurement, best: Mapping[str, Sequence[BestFigure]]) -> int:
        """The number of the measurement. ``best``: by node, the figures that may be the highest so far."""
        return await self._database.run(lambda db: _record(db, measured, best))

    async def latest(self) -> dict[str, NodeFigures]:
        """By node: the newest figures. What the newest measurement left out is taken from earlier ones.

        Figures that were forced on a busy node count only where there are no others.
        """
        return await self._database.run(_latest)

    async def history(self, node: str) -> list[NodeFigures]:
        """The newest first."""
        return await self._database.run(lambda db: _history(db, node))

    async def best(self, node: str) -> list[BestFigure]:
        query = "SELECT what, value, measured_at FROM best_figures WHERE node = ? ORDER BY what"
        return await self._database.run(lambda db: [BestFigure(*row) for row in db.execute(query, (node,))])

    async def link(self, source: str, target: str) -> LinkFigures | None:
        """As seen from ``source``; either of them may have connected."""
        return next((one for one in await self.links({source, target}) if one.source == source), None)

    async def links(self, among: Collection[str] | None = None) -> list[LinkFigures]:
        """In both directions, between these nodes, or all."""
        found = await self._database.run(_links)
        return [one for one in found if among is None or {one.source, one.target} <= set(among)]

    async def allreduces(self, nodes: Collection[str] | None = None) -> list[AllReduceFigures]:
        """Of exactly these nodes, or all; the smallest first."""
        found = await self._database.run(_allreduces)
        return [one for one in found if nodes is None or set(one.nodes) == set(nodes)]

    async def forget(self, node: str) -> None:
        """A node that was removed: another machine may get its name."""
        await self._database.run(lambda db: _forget(db, node))


def _record(db: Connection, measured: Measurement, best: Mapping[str, Sequence[BestFigure]]) -> int:
    run = 1 + (db.execute("SELECT max(run) AS run FROM node_figures").fetchone()["run"] or 0)
    for node in measured.nodes:
        db.execute(
            "INSERT INTO node_figures (run, node, measured_at, content) VALUES (?, ?, ?, ?)",
            (run, node.node, node.measured_at, dumps(node)),
        )
        db.execute(
            "DELETE FROM node_figures WHERE node = ? AND run NOT IN "
            "(SELECT run FROM node_figures WHERE node = ? ORDER BY run DESC LIMIT ?)",
            (node.node, node.node, KEPT_RUNS),
        )
        for one in best.get(node.node, ()):
            db.execute(
                "INSERT INTO best_figures (node, what, value, measured_at) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (node, what) DO UPDATE SET value = excluded.value, measured_at = excluded.measured_at "
                "WHERE excluded.value > best_figures.value",
                (node.node, one.what, one.value, one.measured_at),
            )
    _record_links(db, measured.links)
    _record_allreduces(db, measured.allreduces, run)
    return run


def _record_links(db: Connection, links: Sequence[LinkFigures]) -> None:
    """Those that were forced on a busy node replace no others; so it is with all-reduces."""
    known = {frozenset((one.source, one.target)): one for one in _links(db)}
    for link in links:
        before = known.get(frozenset((link.source, link.target)))
        if link.is_forced and before is not None and not before.is_forced and before.error is None:
            continue
        db.execute("DELETE FROM link_figures WHERE source = ? AND target = ?", (link.target, link.source))
        db.execute(
            "INSERT INTO link_figures (source, target, content) VALUES (?, ?, ?) "
            "ON CONFLICT (source, target) DO UPDATE SET content = excluded.content",
            (link.source, link.target, dumps(link)),
        )


def _record_allreduces(db: Connection, found: Sequence[AllReduceFigures], run: int) -> None:
    known = {(frozenset(one.nodes), one.size_bytes): one for one in _allreduces(db)}
    for one in found:
        before = known.get((frozenset(one.nodes), one.size_bytes))
        if one.is_forced and before is not None and not before.is_forced:
            continue
        db.execute(
            "INSERT INTO allreduce_figures (nodes, size_bytes, run, content) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (nodes, size_bytes) DO UPDATE SET run = excluded.run, content = excluded.content",
            (json.dumps(sorted(one.nodes)), one.size_bytes, run, dumps(one)),
        )
    db.execute(
        "DELETE FROM allreduce_figures WHERE nodes NOT IN "
        "(SELECT nodes FROM allreduce_figures GROUP BY nodes ORDER BY max(run) DESC LIMIT ?)",
        (_KEPT_SETS,),
    )


def _latest(db: Connection) -> dict[str, NodeFigures]:
    runs = [_parse(NodeFigures, row) for row in db.execute("SELECT content FROM node_figures ORDER BY node, run DESC")]
    found: dict[str, NodeFigures] = {}
    for one in sorted(runs, key=lambda run: run.is_forced):
        found[one.node] = found[one.node].completed_by(one) if one.node in found else one
    return found


def _history(db: Connection, node: str) -> list[NodeFigures]:
    query = "SELECT content FROM node_figures WHERE node = ? ORDER BY run DESC"
    return [_parse(NodeFigures, row) for row in db.execute(query, (node,))]


def _links(db: Connection) -> list[LinkFigures]:
    found = [_parse(LinkFigures, row) for row in db.execute("SELECT content FROM link_figures ORDER BY source, target")]
    return [*found, *(one.reversed() for one in found)]


def _allreduces(db: Connection) -> list[AllReduceFigures]:
    query = "SELECT content FROM allreduce_figures ORDER BY nodes, size_bytes"
    return [_parse(AllReduceFigures, row) for row in db.execute(query)]


def _forget(db: Connection, node: str) -> None:
    db.execute("DELETE FROM node_figures WHERE node = ?", (node,))
    db.execute("DELETE FROM best_figures WHERE node = ?", (node,))
    db.execute("DELETE FROM link_figures WHERE source = ? OR target = ?", (node, node))
    for one in _allreduces(db):
        if node in one.nodes:
            db.execute("DELETE FROM allreduce_figures WHERE nodes = ?", (json.dumps(sorted(one.nodes)),))


def _parse(kind: type[T], row: Row) -> T:
    return decode(kind, json.loads(row["content"]))
