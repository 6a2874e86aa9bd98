"""Where the rows are: a SQLite file or a PostgreSQL database, and what the database's thread asks of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ugro.core.errors import UgroError
from ugro.store.connection import Connection
from ugro.store.examine import Examined, Thoroughness

# Clients wait twice as long for the agent. What such a check does not reach is checked in the first backup.
THOROUGH = Thoroughness("integrity_check", limit_s=15.0)


@dataclass(frozen=True, slots=True)
class Design:
    """What a database is to look like."""

    migrations: str = "ugro.store"  # the package with a folder of that name, which holds the steps to the newest schema
    tables: tuple[str, ...] = ("meta", "jobs", "attempts", "events")  # some of those that it must have
    # How to look at it before it is used; None: somebody else has done so.
    how: Thoroughness | None = THOROUGH


@dataclass(frozen=True, slots=True)
class Opening:
    """What is called while a database is opened."""

    on_progress: Callable[[str], None] = lambda text: None
    # With what was found, before anything is written; may raise.
    on_examined: Callable[[Examined], None] = lambda found: None


class ConnectionLost(Exception):
    """In the middle of a transaction, or of its commit."""


class Backend(Protocol):
    """Used by one thread at a time; ``problem`` and ``give_up`` by any."""

    @property
    def name(self) -> str:
        """How errors call it; without a password."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What its connections raise."""

    @property
    def problem(self) -> str | None:
        """Why nothing can be read or written now, though later it may."""

    def examine(self, opening: Opening) -> Examined | None:
        """Before anything is written; raises if it cannot be used. None: nobody was to look."""

    def migrate(self, db: Connection) -> None: ...

    def begin(self) -> Connection: ...

    def commit(self) -> None: ...

    def roll_back(self) -> None: ...

    def close(self) -> None: ...

    @property
    def look_every_s(self) -> float | None:
        """How often ``look`` is called while nobody asks for anything; None: never."""

    def look(self) -> None:
        """Raises ConnectionLost if nothing could be read or written now."""

    def recover(self, lost: ConnectionLost) -> bool:
        """Returns when there is a connection again; True if what was lost had been committed."""

    def give_up(self) -> None:
        """Nobody waits for a lost connection any longer."""

    def makes_room(self, error: Exception) -> bool:
        """Whether nothing of the commit was written for want of space, of which there is more now."""

    def is_fatal(self, error: Exception) -> bool:
        """Whether what the others of the same commit wrote goes with it."""

    def damage_in(self, error: Exception) -> str | None:
        """What is damaged, if the error says so."""

    def unusable(self, error: Exception) -> UgroError:
        """One of ``errors``, for a person."""


def too_new(name: str, schema: int) -> UgroError:
    return UgroError(f"{name} was written by a newer UGRO (schema {schema})", hint="upgrade ugro on this machine")
