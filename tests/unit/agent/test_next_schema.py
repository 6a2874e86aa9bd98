"""The next version of UGRO, whose schema has one step more than this one's, takes over the state of this one.

It is a copy of the package with a step that is made up, and runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import ugro
from tests.rig.stores import ENGINES, on_engine, use_engine
from ugro.kernel.store.address import locate
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.state_dir import StateDir

_PACKAGE = Path(ugro.__file__).parent
_STEP = "ALTER TABLE drained_nodes ADD COLUMN made_up TEXT NOT NULL DEFAULT 'is there';\n"
_NEXT = """
import asyncio, json, sys
from pathlib import Path
from ugro.kernel.agent.backups import Backups
from ugro.kernel.support.state_dir import StateDir
from ugro.kernel.store.database import Store
from ugro.kernel.store.engine import Opening
from ugro.kernel.store.address import locate

async def main():
    home = StateDir(Path(sys.argv[1]))
    store = Store(locate(home))
    backups = Backups(home, store)
    await store.open(Opening(on_examined=backups.before_use))
    query = "SELECT made_up FROM drained_nodes"
    found = await store._database.run(lambda db: [row["made_up"] for row in db.execute(query)])
    await store.close()
    print(json.dumps({"made up": found, "saved": backups.last and backups.last.schema}))

asyncio.run(main())
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_the_next_version_saves_the_state_and_changes_it_and_this_one_then_refuses_it(
    tmp_path: Path, engine: str
) -> None:
    home, later = tmp_path / "home", tmp_path / "later/ugro"
    home.mkdir()
    shutil.copytree(_PACKAGE, later, ignore=shutil.ignore_patterns("__pycache__", "static", "templates"))
    (later / "kernel/store/migrations/0002_made_up.sql").write_text(_STEP)
    with on_engine(engine):
        use_engine(home)
        _in_state(home, lambda store: store.drain("gpu1", "a fan is loud"))
        assert _opened_by_the_next(home, later.parent) == {"made up": ["is there"], "saved": 1}
        assert _opened_by_the_next(home, later.parent) == {"made up": ["is there"], "saved": None}, "nothing to change"
        with pytest.raises(UgroError, match="newer"):
            _in_state(home, Store.drained)


def _in_state(home: Path, work: Callable[[Store], Awaitable[object]]) -> None:
    async def run() -> None:
        store = Store(locate(StateDir(home)))
        try:
            await store.open()
            await work(store)
        finally:
            await store.close()

    asyncio.run(run())


def _opened_by_the_next(home: Path, sources: Path) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    argv = [sys.executable, "-c", _NEXT, str(home)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found
