"""A damaged state is refused, in one clear sentence, and left as it was found."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.rig.damage import (
    JOBS,
    TO_A_CLEAN_STATE,
    TO_A_KILLED_STATE,
    clean_state,
    garbage_in_page_of,
    index_of,
    killed_state,
    log_of,
)
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.store.database import Store
from ugro.kernel.store.engine import Opening, newest_schema
from ugro.kernel.store.examine import Thoroughness, examine
from ugro.kernel.support.errors import Damaged, UgroError


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both are made once, and copied for each test."""
    makers: dict[str, Callable[[Path], Path]] = {"clean": clean_state, "killed": killed_state}
    return {name: make(tmp_path_factory.mktemp(name)).parent for name, make in makers.items()}


def copy(states: dict[str, Path], name: str, folder: Path) -> Path:
    shutil.copytree(states[name], folder, dirs_exist_ok=True)
    return folder / "state.db"


def count_jobs(file: Path, opening: Opening | None = None) -> int:
    async def work() -> int:
        store = Store(file)
        await store.open(opening)
        try:
            return len(await store.jobs.newest(1000))
        finally:
            await store.close()

    return asyncio.run(work())


def contents(folder: Path) -> dict[str, bytes]:
    """Without the index of the log: SQLite makes it, and it may be lost."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.stat().st_size
            and not path.name.endswith("-shm")}  # fmt: skip


CASES = [("clean", name) for name in TO_A_CLEAN_STATE] + [("killed", name) for name in TO_A_KILLED_STATE]


@pytest.mark.parametrize(("state", "damage"), CASES, ids=[damage for _, damage in CASES])
def test_a_damaged_state_is_refused_and_left_alone(
    states: dict[str, Path], tmp_path: Path, state: str, damage: str
) -> None:
    file = copy(states, state, tmp_path)
    (TO_A_CLEAN_STATE | TO_A_KILLED_STATE)[damage](file)
    before = contents(tmp_path)
    for _ in range(2):  # and at the next start, too
        with pytest.raises(Damaged, match="is damaged: ") as caught:
            count_jobs(file)
        assert str(caught.value).startswith(str(file))
        assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_states_that_were_closed_and_killed_are_served(states: dict[str, Path], tmp_path: Path) -> None:
    assert count_jobs(copy(states, "clean", tmp_path / "clean")) == JOBS
    assert count_jobs(copy(states, "killed", tmp_path / "killed")) == 2 * JOBS


def test_a_log_that_a_power_cut_has_torn_at_its_end_is_no_damage(states: dict[str, Path], tmp_path: Path) -> None:
    """Nobody was answered about its last change, and there is no index: the machine was off."""
    file = copy(states, "killed", tmp_path)
    index_of(file).unlink()
    with log_of(file).open("r+b") as log:
        log.seek(-100, os.SEEK_END)
        log.write(b"\x5a" * 100)
    assert count_jobs(file) == 2 * JOBS - 1


def test_what_was_found_is_reported_before_anything_is_written(states: dict[str, Path], tmp_path: Path) -> None:
    file = copy(states, "clean", tmp_path)
    before = file.read_bytes()
    seen: list[int] = []

    def refuse(found: object) -> None:
        seen.append(getattr(found, "schema", 0))
        assert file.read_bytes() == before
        raise UgroError("not now")

    with pytest.raises(UgroError, match="not now"):
        count_jobs(file, Opening(on_examined=refuse))
    assert seen == [newest_schema("ugro.kernel.store")]
    assert file.read_bytes() == before


def test_a_long_check_shows_its_progress_and_ends_in_time(states: dict[str, Path], tmp_path: Path) -> None:
    file = copy(states, "clean", tmp_path)
    with closing(sqlite3.connect(file)) as db:
        rows = [(str(number),) for number in range(20_000)]
        db.executemany("INSERT INTO events (at, kind, text) VALUES ('2026', 'note', ?)", rows)
        db.commit()
    shown: list[str] = []
    how = Thoroughness(limit_s=0, shown_every_s=0)
    assert examine(file, ("events",), how, shown.append).is_checked is False
    assert shown[0].startswith("checking state.db (")
    assert examine(file, ("events",), Thoroughness()).is_checked


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["state.db", "state.db-wal"])
def test_a_file_that_may_not_be_written_is_one_clear_error(
    states: dict[str, Path], tmp_path: Path, name: str
) -> None:
    file = copy(states, "killed", tmp_path)
    (tmp_path / name).chmod(0o400)
    with pytest.raises(UgroError, match=f"{name} must be readable and writable"):
        count_jobs(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["state.db", "state.db-wal"])
def test_a_file_of_another_user_is_one_clear_error(states: dict[str, Path], tmp_path: Path, name: str) -> None:
    file = copy(states, "killed", tmp_path)
    os.chown(tmp_path / name, 65534, -1)
    with pytest.raises(UgroError, match=f"{name} belongs to nobody") as caught:
        count_jobs(file)
    assert "chown" in str(caught.value.hint)


def test_damage_that_is_met_in_use_ends_all_writing_and_says_how_to_go_on(tmp_path: Path) -> None:
    file = clean_state(tmp_path)

    async def work() -> None:
        store = Store(file)
        await store.open()
        store.advise_with(lambda: "restore it")
        garbage_in_page_of("sqlite_autoindex_jobs_1")(file)
        texts = []
        for number in range(3):
            with pytest.raises(Damaged, match=r"state.db is damaged: .*malformed") as caught:
                await store.jobs.submit(JobSpec("train", ("true",)), "ann", f"late {number}")
            texts.append((str(caught.value), caught.value.hint))
        assert store.damage is not None
        assert set(texts) == {(str(store.damage), "restore it")}
        before = contents(tmp_path)
        with pytest.raises(Damaged):
            await store.drain("gpu1", "this table is whole")
        assert contents(tmp_path) == before
        await store.close()

    asyncio.run(work())


@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_acknowledged_once_the_file_was_removed_or_replaced(tmp_path: Path, is_replaced: bool) -> None:
    file = clean_state(tmp_path)

    async def work() -> None:
        store = Store(file)
        await store.open()
        other = shutil.copy(file, tmp_path / "other.db")
        file.unlink()
        if is_replaced:
            Path(other).rename(file)
        for number in range(2):
            with pytest.raises(Damaged, match="it was removed or replaced while it was in use"):
                await store.jobs.submit(JobSpec("train", ("true",)), "ann", f"late {number}")
        await store.close()
        assert file.exists() == is_replaced

    asyncio.run(work())
