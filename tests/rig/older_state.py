"""Puts an older state of an agent back, as a user does who restores a backup."""

from __future__ import annotations

import fcntl
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tests.rig.agent import end_agent
from tests.rig.waiting import wait_until
from ugro.kernel.store.address import PostgresAddress, postgres_at, read_address
from ugro.kernel.support.state_dir import StateDir

_LOCK_S = 30.0
RECORDS = ("agent.mark", "agent.journal")


def saved(home: Path, to: Path) -> Path:
    """A copy of the state as it is now, while the agent runs."""
    to.unlink(missing_ok=True)
    if (address := read_address(StateDir(home))) is not None:
        from ugro.kernel.store.postgres import export  # not everywhere

        export(address, to)
        return to
    with (
        closing(sqlite3.connect(f"file:{home / 'state.db'}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(to)) as copy,
    ):
        source.backup(copy)
    return to


def is_in_safe_mode(copy: Path) -> bool:
    with closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as db:
        return db.execute("SELECT 1 FROM meta WHERE key = 'safe_mode'").fetchone() is not None


def put_back(home: Path, copy: Path, *, without: tuple[str, ...] = ()) -> None:
    """The agent is killed first. ``without``: files beside the state that are lost, too."""
    with _no_agent(home):
        if (address := read_address(StateDir(home))) is not None:
            _load(copy, address)
            return
        for name in ("state.db", "state.db-wal", "state.db-shm", *without):
            (home / name).unlink(missing_ok=True)
        shutil.copy(copy, home / "state.db")


def _load(copy: Path, address: PostgresAddress) -> None:
    from ugro.kernel.store.postgres import load

    database = postgres_at(address)
    with database.held():
        load(copy, database, replaces=True)


@contextmanager
def _no_agent(home: Path) -> Iterator[None]:
    """Other commands may start one at any time: not before this is over."""
    with (home / "agent.lock").open("rb") as lock:

        def is_ours() -> bool:
            end_agent(home)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        wait_until(is_ours, _LOCK_S, "no agent to run")
        yield
