"""Services on disk: a row each, written before anything is done. Of those that have ended, the newest are kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from ugro.features.services.model import Service, ServiceState
from ugro.kernel.config.section import nearest
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.store.connection import NO_LIMIT, Connection, Row
from ugro.kernel.store.engine import Database
from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import NotAllowed, NotFound
from ugro.kernel.support.quantities import is_number

log = logging.getLogger(__name__)

MOST_ENDED = 100
_HINT = "see: ugro serve ls --all"


class ServiceStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, service: Service) -> Service:
        """With its number; the one that has the same request key, if there is one. NotAllowed if its name is taken."""
        return await self._database.run(lambda db: _add(db, service))

    async def change(self, number: int, how: Callable[[Service], Service]) -> Service:
        """Reads, changes and writes in one transaction. ``how`` may raise a UgroError: then nothing is written."""
        return await self._database.run(lambda db: _change(db, number, how))

    async def find(self, word: str) -> Service:
        """By number, or by name: the one that has not ended, or else the newest of that name."""
        if is_number(word):  # no service is called so
            return await self.get(int(word))
        query = "SELECT content FROM services WHERE name = ? ORDER BY state <> ? DESC, id DESC LIMIT 1"
        found = await self._database.run(lambda db: _readable(db.execute(query, (word, ServiceState.ENDED))))
        if not found:
            near = nearest(word, await self._names())
            raise NotFound(f"there is no service {word!r:.80}", hint=f"did you mean {near}?" if near else _HINT)
        return found[0]

    async def _names(self) -> list[str]:
        query = "SELECT name FROM services GROUP BY name ORDER BY MAX(id) DESC"
        return await self._database.run(lambda db: [row["name"] for row in db.execute(query)])

    async def get(self, number: int) -> Service:
        return await self.change(number, lambda service: service)

    async def requested(self, key: str) -> Service | None:
        """That was started with this key."""
        return await self._database.run(lambda db: _requested(db, key))

    async def newest(self, limit: int) -> list[Service]:
        """The newest first."""
        query = "SELECT content FROM services ORDER BY id DESC LIMIT ?"
        return await self._database.run(lambda db: _readable(db.execute(query, (limit,))))

    async def open(self) -> list[Service]:
        """Those that have not ended."""
        query = "SELECT content FROM services WHERE state <> ? ORDER BY id"
        return await self._database.run(lambda db: _readable(db.execute(query, (ServiceState.ENDED,))))

    async def is_taken(self, name: str) -> bool:
        """By a service that has not ended."""
        return await self._database.run(lambda db: _is_taken(db, name))

    async def specs(self) -> list[JobSpec]:
        """Of jobs that may still be made: their code and folders stay."""
        return [one.job for service in await self.open() for one in service.revisions]


def _add(db: Connection, service: Service) -> Service:
    if (known := _requested(db, service.request_key)) is not None:
        return known
    if _is_taken(db, service.name):
        raise name_taken(service.name)
    row = db.execute(
        "INSERT INTO services (key, name, state, content) VALUES (?, ?, ?, ?) RETURNING id",
        (service.request_key, service.name, service.state, "{}"),
    ).fetchone()
    made = replace(service, id=int(row["id"]))
    _write(db, made)
    oldest = f"SELECT id FROM services WHERE state = ? ORDER BY id DESC LIMIT {NO_LIMIT} OFFSET ?"
    db.execute(f"DELETE FROM services WHERE id IN ({oldest})", (ServiceState.ENDED, MOST_ENDED))
    return made


def _requested(db: Connection, key: str) -> Service | None:
    found = _readable(db.execute("SELECT content FROM services WHERE key = ?", (key,)))
    return found[0] if found else None


def _is_taken(db: Connection, name: str) -> bool:
    query = "SELECT 1 FROM services WHERE name = ? AND state <> ?"
    return db.execute(query, (name, ServiceState.ENDED)).fetchone() is not None


def name_taken(name: str) -> NotAllowed:
    return NotAllowed(
        f"there is a service {name} already",
        hint=f"see: ugro serve status {name}; change what it serves: ugro serve update {name} JOB; "
        "for another one: --name NAME",
    )


def _change(db: Connection, number: int, how: Callable[[Service], Service]) -> Service:
    found = _readable(db.execute("SELECT content FROM services WHERE id = ?", (number,)))
    if not found:
        raise NotFound(f"there is no service {number}", hint=_HINT)
    changed = how(found[0])
    if changed != found[0]:
        _write(db, changed)
    return changed


def _write(db: Connection, service: Service) -> None:
    query = "UPDATE services SET state = ?, content = ? WHERE id = ?"
    db.execute(query, (service.state, dumps(service), service.id))


def _readable(rows: Iterable[Row]) -> list[Service]:
    found: list[Service] = []
    for row in rows:
        try:
            found.append(decode(Service, json.loads(row["content"])))
        except (DecodeError, ValueError) as error:  # of another version; its jobs can still be cancelled
            log.error("a service cannot be read: %s", error)
    return found
