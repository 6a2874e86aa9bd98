"""The agent's own backups: made when something has changed and before a migration, without holding anything up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.rig import disk
from tests.rig.damage import clean_state, garbage_in_page_of
from ugro.kernel.agent.backups import Backups
from ugro.kernel.store.backup import BackupFolder
from ugro.kernel.store.database import Store
from ugro.kernel.store.engine import Opening
from ugro.kernel.support.errors import Damaged
from ugro.kernel.support.state_dir import StateDir

_WAIT_S = 120.0


@asynccontextmanager
async def opened(home: Path, every_s: float = 0.01) -> AsyncIterator[tuple[Store, Backups]]:
    store = Store(home / "state.db")
    backups = Backups(StateDir(home), store)
    backups.every_s = backups.first_s = every_s
    await store.open(Opening(on_examined=backups.before_use))
    task = asyncio.create_task(backups.run())
    try:
        yield store, backups
    finally:
        backups.end()
        task.cancel()
        await asyncio.wait([task])
        await store.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(_WAIT_S):
        while not condition():  # noqa: ASYNC110  # the condition is of files, which tell nobody
            await asyncio.sleep(0.005)


def files(home: Path) -> list[Path]:
    return list(BackupFolder(home / "backups").files().values())


def test_a_backup_is_made_when_something_has_changed_and_not_otherwise(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as (store, backups):
            await store.drain("gpu1", "first")
            await until(lambda: not backups.is_due)
            count = len(files(tmp_path))
            await store.drained()
            await store.drain("gpu2", "second")
            await until(lambda: not backups.is_due)
            assert len(files(tmp_path)) == count + 1
            assert backups.problem is None

    asyncio.run(work())


@pytest.mark.parametrize("sign", ["backups/state-000001-20260101T000000Z-schema10.db", "jobs/7/log"])
@pytest.mark.parametrize("state", [None, b""])
def test_a_state_that_is_missing_beside_what_it_knew_is_not_begun_again(
    tmp_path: Path, sign: str, state: bytes | None
) -> None:
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).write_bytes(b"")
    if state is not None:
        (tmp_path / "state.db").write_bytes(state)

    async def work() -> None:
        async with opened(tmp_path):
            pass

    with pytest.raises(Damaged, match=r"state\.db is missing or empty, but the folder has 1 ") as caught:
        asyncio.run(work())
    assert "ugro agent restore --empty" in str(caught.value.hint)
    assert not (tmp_path / "state.db").exists() or (tmp_path / "state.db").read_bytes() == state


def test_a_folder_without_any_sign_of_an_agent_is_begun(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "state.db").touch()  # an agent that was killed in its first moment

    async def work() -> None:
        async with opened(tmp_path, every_s=1000) as (store, _):
            assert await store.next_generation() == 1

    asyncio.run(work())


def test_a_backup_that_meets_damage_ends_all_writing(tmp_path: Path) -> None:
    """Even damage in what nobody has read since the start."""
    state = clean_state(tmp_path)

    async def work() -> None:
        async with opened(tmp_path) as (store, _):
            garbage_in_page_of("events_by_kind")(state)
            await until(lambda: store.damage)
            assert "ugro agent restore" in str(store.damage and store.damage.hint)
            with pytest.raises(Damaged):
                await store.drain("gpu1", "no")

    asyncio.run(work())


def test_a_full_disk_is_a_warning_and_the_next_backup_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if (reason := disk.available()) is not None:
        pytest.skip(reason)
    small = disk.SmallDisk(tmp_path / "backups", 4 << 20)  # less than what a backup leaves to others
    small.mount()

    async def work() -> None:
        async with opened(tmp_path) as (store, backups):
            await store.drain("gpu1", "first")
            await until(lambda: backups.problem)
            assert "nearly full" in str(backups.problem)
            await store.drain("gpu1", "the agent works")
            small.unmount()
            await store.drain("gpu1", "there is space")
            await until(lambda: backups.last and backups.problem is None)

    asyncio.run(work())
    assert [record.levelname for record in caplog.records if "no backup" in record.message] == ["WARNING"]
