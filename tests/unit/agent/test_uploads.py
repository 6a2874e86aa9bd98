"""Uploads of clients: no more than was announced, than the store may have, and than fits on the disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest

from tests.rig import disk
from tests.rig.disk import SmallDisk
from ugro.features.remote_access.service import STALLED_S, Limit, Received, Uploads
from ugro.kernel.files.code.snapshot_store import SnapshotStore
from ugro.kernel.files.code.transfer import SharedLock
from ugro.kernel.support.errors import UgroError, UsageError
from ugro.node import trees
from ugro.node.trees import block, record

MIB = 1 << 20
ROOT = "0" * 64


class Rig:
    """``taken``: pieces of the body that were read; ``made_room``: how often old trees were to be removed."""

    def __init__(self, folder: Path, limit: int, stalled_s: float = STALLED_S) -> None:
        self.snapshots = SnapshotStore(folder)
        self.taken = 0
        self.made_room = 0
        self.lock = SharedLock()
        named = Limit(limit, "sync.store_limit")
        self.uploads = Uploads(self.snapshots, self.lock.shared, named, self._make_room, stalled_s)

    def receive(self, root: str, size: int, pieces: Iterable[bytes]) -> Received:
        return asyncio.run(self.uploads.receive(root, size, self._pieces(pieces)))

    def tree(self, content: bytes) -> Received:
        """Of one file."""
        chunks = [content[at : at + trees.CHUNK] for at in range(0, len(content), trees.CHUNK)]
        body = b"".join(trees.identify(trees.CONTENT, one) for one in chunks)
        tree = trees.encode([trees.TreeEntry(b"file", trees.FILE, 0o644, len(content), body)])
        root = trees.identify(trees.TREE, tree)
        pieces = [*map(sent, chunks), block(b"".join(record(root, trees.TREE, tree)), compressed=True)]
        return self.receive(root.hex(), len(content) + len(tree), pieces)

    async def _pieces(self, pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        for piece in pieces:
            self.taken += 1
            yield piece

    def _make_room(self) -> None:
        self.made_room += 1


def sent(content: bytes) -> bytes:
    return block(b"".join(record(trees.identify(trees.CONTENT, content), trees.CONTENT, content)), compressed=True)


def test_a_body_without_end_stops_where_it_passes_what_was_announced(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 1000 * MIB)

    def endless() -> Iterator[bytes]:
        for number in range(10_000_000):
            yield sent(number.to_bytes(8, "big") * (MIB // 2))  # 4 MiB, and a few kB on the wire

    with pytest.raises(UsageError, match="more was sent than the 9000000 bytes"):
        rig.receive(ROOT, 9_000_000, endless())
    assert rig.taken < 1000
    assert rig.snapshots.size_bytes() < 9 * MIB, "what was unpacked beyond it is not written"
    small = Rig(tmp_path / "small", MIB)
    with pytest.raises(UsageError, match="more was sent than the 0 bytes"):
        small.receive(ROOT, 0, [sent(bytes(60 * MIB))])
    assert small.snapshots.size_bytes() == 0


def test_what_is_announced_must_fit_the_store_before_anything_is_read(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4 * MIB)
    with pytest.raises(UgroError, match=r"too much for the master: .* sync\.store_limit is 4\.0 MiB"):
        rig.receive(ROOT, 9 * MIB, [sent(b"x")])
    assert (rig.taken, rig.made_room) == (0, 1)


def test_many_uploads_together_are_bounded_and_have_old_trees_removed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4 * MIB)
    for _ in range(2):
        assert rig.tree(os.urandom(3 * MIB)).lacking == ()
    with pytest.raises(UgroError, match=r"too much for the master: it has 6\.0 MiB"):
        rig.tree(os.urandom(3 * MIB))
    assert rig.made_room == 3
    lacking = rig.receive(ROOT, MIB, [sent(os.urandom(MIB))])
    assert (lacking.lacking, rig.made_room) == ((ROOT,), 3), "the rest of it is to come, and this must stay until then"


@pytest.mark.parametrize("pause_s", [3600.0, 0.01], ids=["silence", "a trickle"])
def test_an_upload_that_stands_still_does_not_keep_others_from_cleaning_up(tmp_path: Path, pause_s: float) -> None:
    rig = Rig(tmp_path, 4 * MIB, stalled_s=0.2)
    first = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        while True:
            first.set()
            yield b"x"
            await asyncio.sleep(pause_s)

    async def clean_up() -> None:
        await first.wait()
        async with rig.lock.exclusive():
            pass

    async def scenario() -> None:
        async with asyncio.timeout(10):
            cleaning = asyncio.create_task(clean_up())
            with pytest.raises(UgroError, match=r"stood still for 0\.2 s") as stalled:
                await rig.uploads.receive(ROOT, 1, slow())
            assert "what has arrived is kept" in str(stalled.value.hint)
            await cleaning

    asyncio.run(scenario())


def test_an_upload_may_take_its_time_while_it_moves(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 40 * MIB, stalled_s=1.0)

    async def steady() -> AsyncIterator[bytes]:
        for _ in range(11):
            await asyncio.sleep(0.1)
            yield sent(os.urandom(50_000))

    received = asyncio.run(rig.uploads.receive(ROOT, MIB, steady()))
    assert received.lacking == (ROOT,)


@pytest.mark.skipif(disk.available() is not None, reason=str(disk.available()))
def test_an_upload_ends_when_others_fill_the_disk_meanwhile(tmp_path: Path) -> None:
    small = SmallDisk(tmp_path / "disk", 82 * MIB)
    small.mount()

    def pieces() -> Iterator[bytes]:
        for number in range(16):
            if number == 4:
                (small.folder / "of-others").write_bytes(bytes(10 * MIB))
            yield sent(os.urandom(MIB))

    try:
        rig = Rig(small.folder / "store", 1000 * MIB)
        with pytest.raises(UgroError, match="is full"):
            rig.receive(ROOT, 16 * MIB, pieces())
        assert (rig.taken < 14, rig.made_room) == (True, 1)
    finally:
        small.unmount()
