"""Sweeps and their trials on disk. A trial is recorded before its job is submitted, and never twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ugro.features.sweeps.model import Budget, Point, Settings, Sweep, SweepState, Trial, TrialState
from ugro.kernel.config.section import nearest
from ugro.kernel.store.connection import Connection, Row
from ugro.kernel.store.engine import Database
from ugro.kernel.support import moments as clock
from ugro.kernel.support.codec import decode, dumps
from ugro.kernel.support.errors import NotFound
from ugro.kernel.support.quantities import is_number

_NAMED = 1000  # among whose names one that is mistyped is searched
_PAGE = 20
_LARGEST_ID = 2**63 - 1
_PLAIN = "number, settings, asked, state, job, last, best, step, took_s, gpus, reason, ending"


@dataclass(frozen=True, slots=True)
class NewSweep:
    key: str  # that its client chose: the same key is the same sweep
    name: str
    user: str
    document: str
    spec: str
    budget: Budget


class SweepStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, new: NewSweep) -> Sweep:
        return await self._database.run(lambda db: _create(db, new))

    async def created(self, key: str) -> Sweep | None:
        """The sweep that was created with this key."""
        query = "SELECT * FROM sweeps WHERE key = ?"
        row = await self._database.run(lambda db: db.execute(query, (key,)).fetchone())
        return None if row is None else _sweep(row)

    async def find(self, word: str, viewer: str | None) -> Sweep:
        """By number, by name (the newest of that name), or ``last``, among those that this user may see; None: all."""
        return await self._database.run(lambda db: _find(db, word, viewer))

    async def get(self, number: int) -> Sweep:
        query = "SELECT * FROM sweeps WHERE id = ?"
        row = await self._database.run(lambda db: db.execute(query, (number,)).fetchone())
        if row is None:
            raise NotFound(f"there is no sweep {number}", hint="see: ugro sweep ls")
        return _sweep(row)

    async def newest(self, limit: int, viewer: str | None = None) -> list[Sweep]:
        """Among those that this user may see; None: all."""
        return await self._database.run(lambda db: list(islice(_newest(db, viewer), limit)))

    async def unfinished(self) -> list[Sweep]:
        """Those that run, or have trials that have not ended."""
        query = (
            "SELECT * FROM sweeps WHERE state = 'running' OR id IN "
            "(SELECT sweep FROM sweep_trials WHERE state IN ('pending', 'running')) ORDER BY id"
        )
        return [_sweep(row) for row in await self._database.run(lambda db: db.execute(query).fetchall())]

    async def snapshots(self) -> list[str]:
        """The code of sweeps that may still make trials."""
        found = [spec.get("snapshot") for spec in await self._open_specs()]
        return list(dict.fromkeys(str(snapshot) for snapshot in found if snapshot is not None))

    async def folders(self) -> list[str]:
        """The folders of sweeps that may still make trials: the hashes of their trees."""
        found = [folder.get("tree") for spec in await self._open_specs() for folder in spec.get("folders") or ()]
        return list(dict.fromkeys(str(tree) for tree in found if tree is not None))

    async def _open_specs(self) -> list[dict[str, Any]]:
        query = "SELECT spec FROM sweeps WHERE state != 'done' ORDER BY id"
        rows = await self._database.run(lambda db: db.execute(query).fetchall())
        return [json.loads(row["spec"]) for row in rows]

    async def trials(self, sweep: int, *, with_history: bool = True) -> list[Trial]:
        """``with_history``: also the values of each trial, and what the sampler noted; most who ask only count."""
        more = "history, memory" if with_history else "'[]' AS history, '' AS memory"
        query = f"SELECT {_PLAIN}, {more} FROM sweep_trials WHERE sweep = ? ORDER BY number"
        return [_trial(row) for row in await self._database.run(lambda db: db.execute(query, (sweep,)).fetchall())]

    async def next_number(self) -> int:
        """That a sweep would get which is created now."""
        query = "SELECT COALESCE(MAX(id), 0) + 1 AS next FROM sweeps"
        return int(await self._database.run(lambda db: db.execute(query).fetchone()["next"]))

    async def add(
        self, sweep: int, settings: Settings, asked: Sequence[tuple[str, float]], memory: str = ""
    ) -> Trial:
        """Records the next trial."""
        return await self._database.run(lambda db: _add(db, sweep, Trial(0, settings, tuple(asked), memory=memory)))

    async def put(self, sweep: int, trial: Trial) -> None:
        """What has become of it."""
        await self._database.run(lambda db: _put(db, sweep, trial))

    async def move(self, sweep: int, state: SweepState, reason: str, budget: Budget | None = None) -> Sweep:
        """As a person asks."""
        return await self._database.run(lambda db: _move(db, sweep, state, reason, budget))

    async def end(self, sweep: int, state: SweepState, reason: str) -> None:
        """Unless a person has stopped it meanwhile."""
        query = "UPDATE sweeps SET state = ?, reason = ? WHERE id = ? AND state = ?"
        await self._database.run(lambda db: db.execute(query, (state, reason, sweep, SweepState.RUNNING)))

    async def say(self, sweep: int, reason: str) -> None:
        """What it waits for."""
        query = "UPDATE sweeps SET reason = ? WHERE id = ? AND state = ?"
        await self._database.run(lambda db: db.execute(query, (reason, sweep, SweepState.RUNNING)))

    async def add_time(self, sweep: int, seconds: float) -> None:
        query = "UPDATE sweeps SET elapsed_s = elapsed_s + ? WHERE id = ?"
        await self._database.run(lambda db: db.execute(query, (seconds, sweep)))


def _create(db: Connection, new: NewSweep) -> Sweep:
    known = db.execute("SELECT * FROM sweeps WHERE key = ?", (new.key,)).fetchone()
    if known is not None:
        return _sweep(known)
    about = (new.key, new.name, new.user, SweepState.RUNNING)
    values = (*about, new.document, new.spec, dumps(new.budget), clock.now().at)
    row = db.execute(
        "INSERT INTO sweeps (key, name, user, state, document, spec, budget, created_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING *",
        values,
    ).fetchone()
    return _sweep(row)


def _find(db: Connection, word: str, viewer: str | None) -> Sweep:
    found = None
    if is_number(word):  # first: a sweep may be called 5, and must not stand for number 5
        found = next(_newest(db, viewer, "id = ?", int(word)), None)
    if found is None:
        named = _newest(db, viewer) if word == "last" else _newest(db, viewer, "name = ?", word)
        found = next(named, None)
    if found is None:
        what = "there is no sweep" if word == "last" else f"there is no sweep {word!r:.80}"
        near = nearest(word, dict.fromkeys(one.name for one in islice(_newest(db, viewer), _NAMED)))
        raise NotFound(what, hint=f"did you mean {near}?" if near else "see: ugro sweep ls")
    return found


def _newest(db: Connection, viewer: str | None, where: str = "1 = 1", *values: object) -> Iterator[Sweep]:
    """The newest first, of those that this user may see. Read in pages: most who ask need the first one."""
    query, before = f"SELECT * FROM sweeps WHERE {where} AND id < ? ORDER BY id DESC LIMIT ?", _LARGEST_ID
    while rows := db.execute(query, (*values, before, _PAGE)).fetchall():
        sweeps = [_sweep(row) for row in rows]
        yield from (one for one in sweeps if viewer is None or one.user == viewer or not one.is_private)
        before = sweeps[-1].id


def _add(db: Connection, sweep: int, new: Trial) -> Trial:
    query = "SELECT COALESCE(MAX(number), 0) + 1 AS next FROM sweep_trials WHERE sweep = ?"
    trial = replace(new, number=int(db.execute(query, (sweep,)).fetchone()["next"]))
    point, values = (json.dumps(trial.settings), json.dumps(trial.asked)), (trial.state, trial.memory)
    db.execute(
        "INSERT INTO sweep_trials (sweep, number, settings, asked, state, memory) VALUES (?, ?, ?, ?, ?, ?)",
        (sweep, trial.number, *point, *values),
    )
    return trial


def _put(db: Connection, sweep: int, trial: Trial) -> None:
    history = json.dumps([[point.step, point.value] for point in trial.history])
    db.execute(
        "UPDATE sweep_trials SET state = ?, job = ?, last = ?, best = ?, step = ?, took_s = ?, gpus = ?, reason = ?, "
        "ending = ?, history = ? WHERE sweep = ? AND number = ?",
        (
            *(trial.state, trial.job, trial.last, trial.best, trial.step, trial.took_s, trial.gpus, trial.reason),
            *(trial.ending, history, sweep, trial.number),
        ),
    )


def _move(db: Connection, sweep: int, state: SweepState, reason: str, budget: Budget | None) -> Sweep:
    row = db.execute(
        "UPDATE sweeps SET state = ?, reason = ? WHERE id = ? RETURNING *", (state, reason, sweep)
    ).fetchone()
    if budget is not None:
        db.execute("UPDATE sweeps SET budget = ? WHERE id = ?", (dumps(budget), sweep))
    moved = _sweep(row)
    return moved if budget is None else replace(moved, budget=budget)


def _sweep(row: Row) -> Sweep:
    return Sweep(
        row["id"],
        row["name"],
        row["user"],
        SweepState(row["state"]),
        row["reason"],
        row["document"],
        row["spec"],
        decode(Budget, json.loads(row["budget"])),
        row["created_at"],
        row["elapsed_s"],
    )


def _trial(row: Row) -> Trial:
    return Trial(
        row["number"],
        tuple((name, text) for name, text in json.loads(row["settings"])),
        tuple((name, float(at)) for name, at in json.loads(row["asked"])),
        TrialState(row["state"]),
        row["job"],
        row["last"],
        row["best"],
        row["step"],
        row["took_s"],
        row["gpus"],
        row["reason"],
        None if row["ending"] is None else TrialState(row["ending"]),
        tuple(Point(step, value) for step, value in json.loads(row["history"])),
        row["memory"],
    )
