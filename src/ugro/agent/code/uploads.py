"""Receives code and folders of clients on other machines into the stores from which nodes get them.

The same stream as to a node: contents by hash, each checked. An upload that is cut off keeps what has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.agent.code.snapshot_store import SnapshotStore
from ugro.core.errors import UgroError, UsageError
from ugro.remote import trees
from ugro.remote.cas.packs import Lacking, PackWriter
from ugro.remote.cas.stream import BlockReader, StreamError
from ugro.remote.program import Refused

_AT_ONCE = 1 << 20  # bytes that are written in one go
_MOST_LACKING = 8000  # named in one answer
_ROOM_HINT = "make room on the master, or free some there: ugro node gc"


@dataclass(frozen=True, slots=True)
class Received:
    bad: int  # damaged on the way
    lacking: tuple[str, ...]  # of the tree; none: it is complete


def parsed_id(text: str) -> bytes:
    try:
        return trees.parse_id(text)
    except ValueError as error:
        raise UsageError(f"not the hash of a tree: {text[:80]!r}") from error


class Uploads:
    """``exclusive``: keeps others from deleting meanwhile; an asynchronous context manager each time."""

    def __init__(self, snapshots: SnapshotStore, shared: Any) -> None:
        self._snapshots = snapshots
        self._shared = shared

    async def known(self, root: str, others: Sequence[str]) -> tuple[bool, str | None]:
        """Whether the tree is here, and the first of some others that is."""
        found = await asyncio.to_thread(
            lambda: [one for one in (root, *others) if self._snapshots.store.has_root(parsed_id(one))]
        )
        return root in found, next((one for one in found if one != root), None)

    async def missing(self, ids: bytes) -> bytes:
        """One bit for each hash: 1 if its content is not here."""
        if len(ids) % trees.ID_BYTES:
            raise UsageError("hashes that are cut short")
        async with self._shared():
            return await asyncio.to_thread(self._missing, ids)

    def _missing(self, ids: bytes) -> bytes:
        bits = bytearray(-(-len(ids) // trees.ID_BYTES // 8))
        with self._snapshots.alone(), self._snapshots.using() as store:
            store.salvage()
            for count, at in enumerate(range(0, len(ids), trees.ID_BYTES)):
                bits[count >> 3] |= (ids[at : at + trees.ID_BYTES] not in store) << (count & 7)
        return bytes(bits)

    async def receive(self, root: str, size: int, pieces: AsyncIterator[bytes]) -> Received:
        receiving = _Receiving(self._snapshots, parsed_id(root))
        async with self._shared():
            try:
                await asyncio.to_thread(receiving.begin, size)
                buffer = bytearray()
                async for piece in pieces:
                    buffer += piece
                    if len(buffer) >= _AT_ONCE:
                        await asyncio.to_thread(receiving.feed, bytes(buffer))
                        buffer.clear()
                return await asyncio.to_thread(receiving.finish, bytes(buffer))
            except StreamError as error:
                raise UgroError(f"the code was damaged on its way: {error}", hint="try again") from error
            except Refused as error:
                raise UgroError(str(error), hint=_ROOM_HINT) from error
            except OSError as error:
                text = f"the code cannot be stored on the master: {(error.strerror or str(error)).lower()}"
                raise UgroError(text, hint=_ROOM_HINT) from error
            finally:
                receiving.leave()


class _Receiving:
    """One upload, in threads, one call at a time."""

    def __init__(self, snapshots: SnapshotStore, root: bytes) -> None:
        self._snapshots = snapshots
        self._root = root
        self._reader = BlockReader()
        self._writer: PackWriter | None = None
        self._stack = contextlib.ExitStack()

    def begin(self, size: int) -> None:
        with self._snapshots.alone():
            store = self._stack.enter_context(self._snapshots.using())
            store.expect_room(size)
            self._writer = PackWriter(store)

    def feed(self, piece: bytes) -> None:
        assert self._writer is not None
        for key, kind, content in self._reader.feed(piece):
            self._writer.add(key, kind, content)

    def finish(self, piece: bytes) -> Received:
        self.feed(piece)
        self._reader.finish()
        assert self._writer is not None
        self._writer.sync()
        with self._snapshots.alone():
            self._writer.finish()
            self._writer = None
            try:
                self._snapshots.store.complete(self._root)
            except Lacking as error:
                return Received(self._reader.bad, tuple(key.hex() for key in error.ids[:_MOST_LACKING]))
        self._snapshots.settle()
        return Received(self._reader.bad, ())

    def leave(self) -> None:
        """What has arrived is found by the next one who asks what is missing."""
        if self._writer is not None:
            self._writer.leave()
            self._writer = None
        self._stack.close()
