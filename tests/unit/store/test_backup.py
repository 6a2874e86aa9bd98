"""Backups: whole, checked, one file, made while the state is in use."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.rig import disk
from tests.rig.damage import JOBS, clean_state, garbage_in_page_of, killed_state, log_of, shorten, zero_page_of
from tests.rig.stores import in_store
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.store import backup
from ugro.kernel.store.backup import BackupFolder
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import Damaged, UgroError

MOST = 5000


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clean_state(tmp_path_factory.mktemp("state"))


@pytest.fixture
def state(made_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made_once, tmp_path / "state.db"))


def keys(file: Path) -> set[str]:
    with closing(sqlite3.connect(f"file:{file}?immutable=1", uri=True)) as db:
        return {key for (key,) in db.execute("SELECT submit_key FROM jobs")}


def test_nobody_reads_a_backup_in_a_file_that_was_put_there_before(state: Path) -> None:
    """The agent's key is in it."""
    part = state.parent / "copy.db.part"
    part.touch(0o666)
    with part.open("rb") as others:
        backup.make(state, state.parent / "copy.db")
        assert others.read() == b""


def test_a_backup_is_one_private_file_with_all_that_was_acknowledged(state: Path) -> None:
    target = state.parent / "backups" / "copy.db"
    target.parent.mkdir()

    async def work(store: Store) -> None:
        await store.jobs.submit(JobSpec("late", ("true",)), "ann", "late")
        made = await asyncio.to_thread(backup.make, state, target)
        assert (made.jobs, made.newest_job, made.problem) == (JOBS + 1, JOBS + 1, None)

    in_store(state.parent, work)
    assert [path.name for path in target.parent.iterdir()] == ["copy.db"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert "late" in keys(target)


def test_a_backup_is_made_while_changes_go_on_and_is_one_moment_of_them(state: Path) -> None:
    """However many come meanwhile: the copy is not begun again for each of them."""
    is_made = asyncio.Event()

    async def submit(store: Store) -> int:
        count = 0
        while not is_made.is_set() and count < MOST:
            await store.jobs.submit(JobSpec("busy", ("true",)), "ann", f"busy {count}")
            count += 1
        return count

    async def work(store: Store) -> None:
        await store.drain("gpu1", "x" * 20_000_000)  # a copy of many steps
        submitting = asyncio.create_task(submit(store))
        made = await asyncio.to_thread(backup.make, state, state.parent / "copy.db")
        is_made.set()
        count = await submitting
        assert JOBS <= made.jobs <= JOBS + count
        assert 3 <= count < MOST  # nobody had to wait for the end of the copy, nor the copy for the end of changes
        there = keys(state.parent / "copy.db")
        assert {f"busy {number}" for number in range(made.jobs - JOBS)} == {key for key in there if "busy" in key}

    in_store(state.parent, work)


@pytest.mark.proof
def test_submissions_keep_their_pace_while_a_large_state_is_backed_up(state: Path) -> None:
    """In proportion to their pace just before, in the best of a few rounds: other programs use the disk, too."""

    async def pace(store: Store, key: str, is_over: Callable[[], bool]) -> float:
        count, began = 0, time.monotonic()
        while not is_over():
            await store.jobs.submit(JobSpec("busy", ("true",)), "ann", f"{key} {count}")
            count += 1
        return count / (time.monotonic() - began)

    async def round_of(store: Store, number: int) -> float:
        until = time.monotonic() + 1
        alone = await pace(store, f"alone {number}", lambda: time.monotonic() > until)
        target = state.parent / f"copy {number}.db"
        backing_up = asyncio.create_task(asyncio.to_thread(backup.make, state, target))
        beside = await pace(store, f"beside {number}", backing_up.done)
        assert (await backing_up).problem is None
        return beside / alone

    async def work(store: Store) -> None:
        for number in range(10):
            await store.drain(f"gpu{number}", "x" * 10_000_000)
        assert max([await round_of(store, number) for number in range(5)]) > 0.5

    in_store(state.parent, work)


def test_files_of_the_identity_are_in_the_backup(state: Path, tmp_path: Path) -> None:
    key = tmp_path / "agent.key"
    key.write_bytes(b"\0secret")
    backup.make(state, tmp_path / "copy.db", [key, tmp_path / "not there"])
    assert backup.check(tmp_path / "copy.db").files == {"agent.key": b"\0secret"}


@pytest.mark.parametrize("damage", [zero_page_of("events"), garbage_in_page_of("sqlite_autoindex_jobs_1")])
def test_no_backup_is_made_of_a_damaged_state(state: Path, damage: Callable[[Path], None]) -> None:
    damage(state)
    (state.parent / "backups").mkdir()
    with pytest.raises(Damaged, match=r"state\.db is damaged"):
        backup.make(state, state.parent / "backups" / "copy.db")
    assert list((state.parent / "backups").iterdir()) == []


def test_a_backup_is_given_up_when_it_is_not_wanted(state: Path) -> None:
    (state.parent / "backups").mkdir()
    with pytest.raises(UgroError, match="given up"):
        backup.make(state, state.parent / "backups" / "copy.db", is_wanted=lambda: False)
    assert list((state.parent / "backups").iterdir()) == []


def test_a_restored_state_is_as_the_backed_up_one(state: Path, tmp_path: Path) -> None:
    backup.make(state, tmp_path / "copy.db")
    (tmp_path / "again").mkdir()
    backup.restore(tmp_path / "copy.db", tmp_path / "again" / "state.db")
    assert keys(tmp_path / "again" / "state.db") == keys(state)

    async def work(store: Store) -> None:
        await store.jobs.submit(JobSpec("next", ("true",)), "ann", "next")

    in_store(tmp_path / "again", work)
    with closing(sqlite3.connect(tmp_path / "again" / "state.db")) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    assert not any(name.startswith("backup") for name in tables)


def test_a_state_whose_log_is_damaged_is_restored_from_its_file_alone(tmp_path: Path) -> None:
    """Without what was in the log only; the user was told so."""
    state = killed_state(tmp_path)
    log_of(state).write_bytes(b"garbage" * 100)
    (tmp_path / "again").mkdir()
    assert backup.restore(state, tmp_path / "again" / "state.db").backup.jobs == JOBS

    async def work(store: Store) -> None:
        assert len(await store.jobs.newest(1000)) == JOBS

    in_store(tmp_path / "again", work)


def test_the_newest_good_backup_is_named_and_bad_ones_are_not(state: Path, tmp_path: Path) -> None:
    folder = BackupFolder(tmp_path / "backups")
    folder.path.mkdir()
    paths = []
    for second in range(3):
        paths.append(folder.next_path(10, 1_700_000_000 - second))  # the clock goes back
        backup.make(state, paths[-1])
    (tmp_path / "backups" / "notes.txt").write_text("not ours")
    shorten(paths[2])
    newest = folder.newest_good()
    assert newest is not None
    assert newest.path == str(paths[1])
    assert [found.problem is None for found in folder.all()] == [False, True, True]


def test_half_made_backups_of_a_killed_agent_are_removed(state: Path, tmp_path: Path) -> None:
    folder = BackupFolder(tmp_path / "backups")
    folder.path.mkdir()
    target = folder.next_path(10, 1_700_000_000)
    backup.make(state, target)
    (tmp_path / "backups" / "state-000002-x.db.part").write_bytes(b"half")
    folder.tidy(1_700_000_000)
    assert [path.name for path in (tmp_path / "backups").iterdir()] == [target.name]


def test_a_full_disk_is_one_clear_error_and_nothing_is_left(state: Path, tmp_path: Path) -> None:
    if (reason := disk.available()) is not None:
        pytest.skip(reason)
    small = disk.SmallDisk(tmp_path / "small", 64 * 1024)
    small.mount()
    try:
        with pytest.raises((UgroError, OSError), match="full"):
            backup.make(state, small.folder / "copy.db")
        assert list(small.folder.iterdir()) == []
    finally:
        small.unmount()
