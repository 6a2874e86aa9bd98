"""Receives code and folders of clients on other machines into the stores from which nodes get them.

The same stream as to a node: contents by hash, each checked. An upload that is cut off keeps what has arrived. A client
is not trusted with the disk: what is unpacked is counted, against what it announced and what the store may have. Nor
is it with time: nothing is deleted while an upload is under way, so one that stands still is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from ugro.kernel.files.code.snapshot_store import SnapshotStore
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import UgroError, UsageError
from ugro.kernel.support.quantities import format_size
from ugro.node import machine as disk
from ugro.node import trees
from ugro.node.files.packs import Lacking, PackWriter
from ugro.node.program import Refused
from ugro.node.trees import BlockReader, StreamError

T = TypeVar("T")

_AT_ONCE = 1 << 20  # bytes that are written in one go
_LOOK_BYTES = 8 << 20  # after so many, the room on the disk is looked at again: others write, too
_MOST_LACKING = 8000  # named in one answer
STALLED_S = 60.0  # waiting for the next ``_LEAST_BYTES``; the time that storing them takes is not counted
_LEAST_BYTES = 16 << 10
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


def as_sent(cls: type[T], value: Any) -> T:
    """What a client says of something that it has sent. Raises UsageError."""
    try:
        return decode(cls, value)
    except DecodeError as error:
        raise UsageError(f"this is not what was asked for: {error}") from error


@dataclass(frozen=True, slots=True)
class Limit:
    """How much the store keeps. With what arrives it may have twice that, until old trees are removed."""

    bytes: int
    name: str  # of the setting


class Uploads:
    """``shared``: keeps others from deleting meanwhile. ``make_room``: called when something came, or does not fit.

    ``stalled_s``: for so long a body may bring next to nothing.
    """

    def __init__(
        self,
        snapshots: SnapshotStore,
        shared: Callable[[], AbstractAsyncContextManager[None]],
        limit: Limit,
        make_room: Callable[[], None],
        stalled_s: float = STALLED_S,
    ) -> None:
        self._snapshots = snapshots
        self._shared = shared
        self._limit = limit
        self._make_room = make_room
        self._stalled_s = stalled_s

    def has(self, root: str) -> bool:
        """Whether a tree that a client names is complete. Raises UsageError. Blocks."""
        return self._snapshots.store.has_root(parsed_id(root))

    async def known(self, root: str, others: Sequence[str]) -> tuple[bool, str | None]:
        """Whether the tree is here, and the first of some others that is."""
        found = await asyncio.to_thread(lambda: [one for one in (root, *others) if self.has(one)])
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
        """``size``: of all contents, without compression. Raises UsageError for more, UgroError if there is no room."""
        receiving = _Receiving(self._snapshots, parsed_id(root), size, self._limit)
        received = await self._received(receiving, pieces)
        if not received.lacking:  # else the rest follows, and what is here must stay until then
            self._make_room()
        return received

    async def _received(self, receiving: _Receiving, pieces: AsyncIterator[bytes]) -> Received:
        async with self._shared():
            try:
                await asyncio.to_thread(receiving.begin)
                buffer = bytearray()
                async for piece in _moving(pieces, self._stalled_s):
                    buffer += piece
                    if len(buffer) >= _AT_ONCE:
                        await asyncio.to_thread(receiving.feed, bytes(buffer))
                        buffer.clear()
                return await asyncio.to_thread(receiving.finish, bytes(buffer))
            except StreamError as error:
                raise UgroError(f"the code was damaged on its way: {error}", hint="try again") from error
            except Refused as error:
                self._make_room()
                raise UgroError(str(error), hint=_ROOM_HINT) from error
            except OSError as error:
                text = f"the code cannot be stored on the master: {(error.strerror or str(error)).lower()}"
                raise UgroError(text, hint=_ROOM_HINT) from error
            finally:
                receiving.leave()


async def _moving(pieces: AsyncIterator[bytes], stalled_s: float) -> AsyncIterator[bytes]:
    """As long as they come. A trickle would hold up clean-up, and with it everybody, as well as silence does."""
    left_s, came = stalled_s, 0
    while True:
        since = time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            hint = "check the connection and try again: what has arrived is kept"
            raise UgroError(f"the upload stood still for {stalled_s:g} s", hint=hint) from error
        left_s, came = left_s - (time.monotonic() - since), came + len(piece)
        if came >= _LEAST_BYTES:
            left_s, came = stalled_s, 0
        yield piece


class _Receiving:
    """One upload, in threads, one call at a time."""

    def __init__(self, snapshots: SnapshotStore, root: bytes, size: int, limit: Limit) -> None:
        self._snapshots = snapshots
        self._root = root
        self._size = size
        self._limit = limit
        self._came = 0  # bytes of contents so far
        self._looked_at = 0  # how many there were then
        self._reader = BlockReader()
        self._writer: PackWriter | None = None
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        with self._snapshots.alone():
            store = self._stack.enter_context(self._snapshots.using())
            self._expect_room()
            self._writer = PackWriter(store)

    def feed(self, piece: bytes) -> None:
        assert self._writer is not None
        for key, kind, content in self._reader.feed(piece):
            self._came += len(content)
            if self._came > self._size:  # before it is written: a block can be a thousand times what was sent
                raise UsageError(f"more was sent than the {self._size} bytes that were announced")
            if self._came - self._looked_at > _LOOK_BYTES:
                self._looked_at = self._came
                self._expect_room()
            self._writer.add(key, kind, content)

    def _expect_room(self) -> None:
        """For what is still to come: on the disk, and in the store."""
        to_come, stored = self._size - self._came, self._snapshots.size_bytes()
        if stored + to_come > 2 * self._limit.bytes:
            text = f"too much for the master: it has {format_size(stored)}, and {format_size(to_come)} are to come"
            raise Refused(disk.NO_SPACE, f"{text}; {self._limit.name} is {format_size(self._limit.bytes)}")
        self._snapshots.store.expect_room(to_come)

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
