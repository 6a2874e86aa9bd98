"""Shows where the state is, and moves it between SQLite and PostgreSQL: ``python -m ugro.kernel.store.relocation``.

Clients start it. It reads what is wanted from stdin, because a URL may hold a password by mistake, and process lists
show arguments. It prints one JSON document. While it moves a state it holds the agent's lock.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ugro.kernel.agent.main import HomeLock
from ugro.kernel.agent.model import Moved, StoreStatus
from ugro.kernel.store import backup
from ugro.kernel.store.address import (
    PostgresAddress,
    look_at,
    make_address,
    postgres_at,
    read_address,
    refuse_used,
    write_address,
)
from ugro.kernel.store.connection import Design, count_rows
from ugro.kernel.store.engine import connect, connect_plainly, migrate
from ugro.kernel.store.examine import Thoroughness, examine
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError
from ugro.kernel.support.state_dir import StateDir

_SQLITE = "sqlite"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ugro.kernel.store.relocation")
    parser.add_argument("--home", required=True)
    home = StateDir(Path(parser.parse_args().home).absolute())
    os.umask(0o077)
    try:
        answer = _do(home, json.load(sys.stdin))
    except UgroError as error:
        answer = {"error": error.to_wire()}
    except OSError as error:
        answer = {"error": home.unusable(error).to_wire()}
    sys.stdout.write(dumps(answer))


def _do(home: StateDir, wish: Mapping[str, Any]) -> dict[str, Any]:
    if wish.get("to") is None:
        return {"store": status(home)}
    target = None if wish["to"] == _SQLITE else make_address(str(wish["to"]), wish.get("password_file"), "--to")
    _refuse_in_vain(home, target)
    return {} if wish.get("checks_only") else {"moved": move(home, target)}


def status(home: StateDir) -> StoreStatus:
    """Whether an agent uses it or not."""
    address = read_address(home)
    if address is None:
        size = home.database.stat().st_size if home.database.exists() else 0
        schema = backup.schema_of(home.database) if size else 0
        return StoreStatus(_SQLITE, str(home.database), schema, size)
    return look_at(address)


def move(home: StateDir, target: PostgresAddress | None) -> Moved:
    home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if HomeLock.take(home) is None:
        raise NotAllowed(
            f"an agent runs in {home.path}", hint="stop it first: ugro agent stop; jobs on the nodes keep running"
        )
    source = read_address(home)
    if target is not None:
        return _to_postgres(home, target)
    assert source is not None
    return _finish(home, source) if _is_left_to_finish(home, source) else _to_sqlite(home, source)


def _refuse_in_vain(home: StateDir, target: PostgresAddress | None) -> None:
    """What can be known before an agent is stopped for it."""
    source = read_address(home)
    if (source is None) == (target is None):
        where = source.url if source is not None else str(home.database)
        hint = "to another database: first --to sqlite, then there" if source is not None else None
        raise NotAllowed(f"the state is in {where} already", hint=hint)
    if source is None and not home.database.exists():
        raise NotFound(f"there is no state in {home.path}", hint="the agent makes it: ugro agent start")
    if source is not None and home.database.exists() and not _is_left_to_finish(home, source):
        raise NotAllowed(f"{home.database} exists", hint="it is an older state; move it away first")
    if target is not None:
        refuse_used(target)


def _to_postgres(home: StateDir, target: PostgresAddress) -> Moved:
    database = postgres_at(target)
    from ugro.kernel.store.postgres import load

    examine(home.database, Design().tables, Thoroughness())
    with closing(connect(home.database)) as db:  # also copies its log into it
        db.execute("BEGIN")
        migrate(db, Design().migrations)
        db.execute("COMMIT")
    with database.held():
        counts = load(home.database, database)
        write_address(home, target)
        aside = _set_aside(home.database)
    return Moved(target.url, len(counts), sum(counts.values()), str(aside))


def _to_sqlite(home: StateDir, source: PostgresAddress) -> Moved:
    database = postgres_at(source)
    from ugro.kernel.store.postgres import export, mark_moved

    fresh = home.database.with_name("state.db.moving")
    fresh.unlink(missing_ok=True)
    try:
        with database.held():  # no agent uses it meanwhile, on this machine or another
            counts = export(source, fresh)
            examine(fresh, Design().tables, Thoroughness())
            backup.sync(fresh)
            fresh.replace(home.database)
            backup.sync(home.path)
            mark_moved(source, str(home.database))
            write_address(home, None)
    finally:
        fresh.unlink(missing_ok=True)
    return Moved(str(home.database), len(counts), sum(counts.values()), source.url)


def _is_left_to_finish(home: StateDir, source: PostgresAddress) -> bool:
    """The last move to SQLite was interrupted after the database was marked: the file is the state."""
    postgres_at(source)  # for its error
    from ugro.kernel.store.postgres import moved_to

    return home.database.exists() and moved_to(source) == str(home.database)


def _finish(home: StateDir, source: PostgresAddress) -> Moved:
    write_address(home, None)
    with closing(connect_plainly(home.database)) as db:
        counts = count_rows(db, backup.schema_of(home.database))
    return Moved(str(home.database), len(counts), sum(counts.values()), source.url)


def _set_aside(path: Path) -> Path:
    """A database with its log, which is empty by now."""
    aside = path.with_name(f"{path.name}.before-move-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for more in ("", "-wal", "-shm"):
        old = path.with_name(path.name + more)
        if old.exists():
            old.rename(aside.with_name(aside.name + more))
    return aside


if __name__ == "__main__":
    main()
