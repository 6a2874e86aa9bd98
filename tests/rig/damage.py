"""A state on disk as a killed agent leaves it, and what can happen to it there."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.store.database import Store

JOBS = 30
_PAGE = 4096
_FILL_AND_DIE = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.rig.damage import fill

asyncio.run(fill(Path(sys.argv[1]), "killed"))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def fill(file: Path, key: str) -> Store:
    """Leaves it open."""
    store = Store(file)
    await store.open()
    await store.next_generation()
    await store.agent_id()
    for number in range(JOBS):
        await store.jobs.submit(JobSpec("train", ("true",)), "ann", f"{key} {number}")
    return store


def clean_state(folder: Path) -> Path:
    async def work() -> None:
        await (await fill(folder / "state.db", "clean")).close()

    asyncio.run(work())
    return folder / "state.db"


def killed_state(folder: Path) -> Path:
    """With changes in its log only."""
    file = clean_state(folder)
    subprocess.run([sys.executable, "-c", _FILL_AND_DIE, str(file)], timeout=60, check=False)
    assert log_of(file).stat().st_size > 20 * _PAGE
    return file


def log_of(file: Path) -> Path:
    return file.with_name(file.name + "-wal")


def index_of(file: Path) -> Path:
    return file.with_name(file.name + "-shm")


def overwrite(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def root_page(file: Path, name: str) -> int:
    """The first page of a table or an index."""
    with closing(sqlite3.connect(f"file:{file}?immutable=1", uri=True)) as db:
        return int(db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0])


def ruin_in_use(file: Path) -> None:
    """The file and its log. What an agent has of them in memory stays valid until somebody else makes a change."""
    with closing(sqlite3.connect(file, timeout=10)) as db:
        db.execute("UPDATE meta SET value = value")
        db.commit()
        for part in (file, log_of(file)):
            overwrite(part, _PAGE, b"\x5a" * (part.stat().st_size - _PAGE))


def zero_page_of(name: str) -> Callable[[Path], None]:
    return lambda file: overwrite(file, (root_page(file, name) - 1) * _PAGE, bytes(_PAGE))


def garbage_in_page_of(name: str) -> Callable[[Path], None]:
    return lambda file: overwrite(file, (root_page(file, name) - 1) * _PAGE, b"\x5a" * _PAGE)


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2 // _PAGE * _PAGE)


def lose_index_rows(file: Path) -> None:
    """A page of the index by submit key becomes an empty one, which is well-formed: only its rows are missing."""
    empty_page = b"\x0a\0\0\0\0\x10\0\0".ljust(_PAGE, b"\0")
    overwrite(file, (root_page(file, "sqlite_autoindex_jobs_1") - 1) * _PAGE, empty_page)


def lose_parents(file: Path) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute("INSERT INTO to_keep (job) VALUES (999)")  # without the pragma SQLite does not mind
        db.commit()


def become_another_program(file: Path) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
        db.commit()


def become_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def take_log_of_another(file: Path) -> None:
    """Of a state with other jobs, and of the same size."""
    other = file.parent / "other"
    other.mkdir()
    stranger = killed_state(other)
    shutil.copy(log_of(stranger), log_of(file))
    index_of(file).unlink(missing_ok=True)


# What happens to a state whose agent was stopped in good order.
TO_A_CLEAN_STATE: dict[str, Callable[[Path], None]] = {
    "half of it is gone": shorten,
    "a page of jobs is zero": zero_page_of("jobs"),
    "a page of events is zero": zero_page_of("events"),
    "a page of an index is garbage": garbage_in_page_of("events_by_job"),
    "the schema is zero": lambda file: overwrite(file, 100, bytes(_PAGE - 100)),
    "its header is another": lambda file: overwrite(file, 0, b"PK\x03\x04"),
    "its page size is impossible": lambda file: overwrite(file, 16, b"\x03\x03"),
    "rows are missing in an index": lose_index_rows,
    "a row refers to a job that does not exist": lose_parents,
    "it is a text": lambda file: overwrite(file, 0, b"not a database, but long enough to be looked at" * 10),
    "it is of another program": become_another_program,
    "it is a folder": become_a_folder,
    "it has the log of another state": take_log_of_another,
}


def _without_index(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def both(file: Path) -> None:
        change(file)
        index_of(file).unlink()

    return both


def _cut_log(file: Path) -> None:
    os.truncate(log_of(file), log_of(file).stat().st_size // 2)


# What happens to a state whose agent was killed: its last changes are in the log.
TO_A_KILLED_STATE: dict[str, Callable[[Path], None]] = {
    "half of its log is gone": _cut_log,
    "its log is empty": lambda file: os.truncate(log_of(file), 0),
    "its log is missing": lambda file: log_of(file).unlink(),
    "its log begins with garbage": lambda file: overwrite(log_of(file), 0, b"\x5a" * 64),
    "its log begins with garbage, and has no index": _without_index(lambda f: overwrite(log_of(f), 0, b"\x5a" * 64)),
    "its log begins with zeros": lambda file: overwrite(log_of(file), 0, bytes(64)),
    "its log has garbage inside": lambda file: overwrite(log_of(file), 10 * _PAGE, b"\x5a" * 64),
    "its log has garbage inside, and no index": _without_index(
        lambda file: overwrite(log_of(file), 10 * _PAGE, b"\x5a" * 64)
    ),
    "it is empty, and its log is not": lambda file: os.truncate(file, 0),
}
