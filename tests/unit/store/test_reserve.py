"""Space that is kept for the state, on a disk that is really full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rig import disk
from tests.rig.disk import SmallDisk
from ugro.kernel.store.connection import Connection
from ugro.kernel.store.engine import LEAST_BYTES, PIECE_BYTES, PIECES, Database, Reserve, is_short
from ugro.kernel.support.errors import UgroError

pytestmark = pytest.mark.skipif(disk.available() is not None, reason=str(disk.available()))
WHOLE = PIECES * PIECE_BYTES


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    made = SmallDisk(tmp_path / "disk", LEAST_BYTES + 2 * WHOLE)
    made.mount()
    yield made
    made.unmount()


def test_it_is_taken_while_there_is_enough_and_given_piece_by_piece(small: SmallDisk) -> None:
    reserve = Reserve(small.folder / "reserve")
    reserve.take()
    assert reserve.bytes_left == WHOLE
    assert reserve.free_bytes <= small.size_bytes - WHOLE, "others cannot have it"
    assert not is_short(small.folder)
    small.fill()
    assert is_short(small.folder)
    assert reserve.give()
    reserve.take()
    assert reserve.bytes_left == WHOLE - PIECE_BYTES, "not while others have too little"
    assert [reserve.give() for _ in range(PIECES)] == [True] * (PIECES - 1) + [False]
    small.free()
    reserve.take()
    assert reserve.bytes_left == WHOLE


def test_the_state_is_written_on_a_full_disk_and_nothing_that_was_acknowledged_is_lost(small: SmallDisk) -> None:
    reserve = Reserve(small.folder / "reserve")
    reserve.take()

    def add(key: str) -> Callable[[Connection], None]:
        def work(db: Connection) -> None:
            db.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (key, "x" * 3000))

        return work

    async def write() -> list[str]:
        database = Database(small.folder / "state.db", reserve=reserve)
        await database.open()
        small.fill()
        kept: list[str] = []
        large = (5 * PIECE_BYTES) // 2
        await database.run(
            lambda db: db.execute("INSERT INTO meta (key, value) VALUES ('large', ?)", ("y" * large,)) and None
        )
        together = await asyncio.gather(*(database.run(add(f"many {n}")) for n in range(200)), return_exceptions=True)
        assert together == [None] * 200
        kept += [f"many {n}" for n in range(200)]
        for number in range(10_000):  # until another program has taken all of what was given
            small.fill()
            [refused] = await asyncio.gather(database.run(add(f"one {number}")), return_exceptions=True)
            if refused is not None:
                break
            kept.append(f"one {number}")
        assert isinstance(refused, UgroError)
        assert "disk is full" in str(refused)
        assert (len(kept) > 200, reserve.bytes_left) == (True, 0)
        small.free()
        await database.run(add("after"))
        found = await database.run(lambda db: [row["key"] for row in db.execute("SELECT key FROM meta")])
        await database.close()
        assert {*kept, "large", "after"} <= set(found)
        assert f"one {number}" not in found
        return kept

    asyncio.run(write())


def test_without_a_reserve_a_full_disk_is_an_error_as_before(small: SmallDisk) -> None:
    async def write() -> None:
        database = Database(small.folder / "state.db")
        await database.open()
        small.fill()
        with pytest.raises(UgroError, match="disk is full"):
            await database.run(lambda db: db.execute("INSERT INTO meta VALUES ('a', ?)", ("x" * 10**6,)) and None)
        await database.close()

    asyncio.run(write())
