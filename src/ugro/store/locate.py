"""Finds the backend of a state directory. PostgreSQL's client is loaded only where it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ugro.core.errors import NotAllowed, UgroError
from ugro.core.store import StoreStatus
from ugro.core.support.state_dir import StateDir
from ugro.store.address import PostgresAddress, read_address

if TYPE_CHECKING:
    from ugro.store.postgres import Postgres


def locate(home: StateDir, on_taken: Callable[[UgroError], None] = lambda error: None) -> Path | Postgres:
    """``on_taken``: called if the database turns out to be another agent's after a lost connection."""
    address = read_address(home)
    return home.database if address is None else postgres_at(address, on_taken)


def postgres_at(address: PostgresAddress, on_taken: Callable[[UgroError], None] = lambda error: None) -> Postgres:
    try:
        from ugro.store.postgres import Postgres
    except ImportError as error:
        what = "the client of PostgreSQL is not installed, or does not work"
        raise UgroError(f"{what}: {error}", hint="pip install 'ugro[postgres]'") from error
    return Postgres(address, on_taken=on_taken)


def look_at(address: PostgresAddress) -> StoreStatus:
    postgres_at(address)  # for its error
    from ugro.store.postgres_copy import look

    return look(address)


def refuse_used(address: PostgresAddress) -> None:
    """Raises if it cannot be reached, or has a state."""
    address.password()  # for its error
    found = look_at(address)
    if found.problem is not None:
        raise UgroError(f"{address.url} cannot be used: {found.problem}", hint="try: psql with this URL")
    if found.schema:
        raise NotAllowed(f"{address.url} is not empty: it has a state of UGRO", hint="name a new database")
