"""The code on one node, over its link: whether it is there, what of it is missing, sending that.

Contents are sent in blocks, never more at once than the window of a call, compressed if that is measured to be faster.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ugro.core.code import Tidied
from ugro.core.errors import RemoteFailure
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.streaming import NodeCalls, Thread, Upload
from ugro.remote import trees, wire
from ugro.remote.cas.contents import WINDOW
from ugro.remote.cas.packs import ContentStore
from ugro.remote.cas.stream import BLOCK, block, record

_ANSWER_S = 30.0
TIDY_S = 600.0
_PUT_BYTES, _MOST_PUT = 64 * 1024, 100
_LEAST_COST = 1 / 100e6  # seconds per byte: compressing cannot be faster
_FIRST_BLOCKS = 5  # only fill the window, and are not measured
_AGAIN_BLOCKS = 32  # then the other way is tried once: contents, or the link, may have changed

T = TypeVar("T")
_Id = bytes


@dataclass(frozen=True, slots=True)
class _Has:
    has: bool


@dataclass(frozen=True, slots=True)
class _Received:
    bad: int
    lacking: tuple[str, ...]


@dataclass(slots=True)
class Sent:
    """How far a transfer is; ``on_change`` is called at every step."""

    files: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    bad: int = 0  # damaged during the transfer and sent again
    on_change: Callable[[], None] = field(default=lambda: None)
    completed_by: Callable[[Sequence[_Id]], int] = len  # files that are complete with these contents

    def add(self, blocks: _Blocks, wire_bytes: int) -> None:
        self.files += self.completed_by(blocks.keys)
        self.bytes += blocks.bytes
        self.wire_bytes += wire_bytes
        self.on_change()


class NodeContents(NodeCalls):
    prefix = "contents."
    what: ClassVar[str] = "the code"
    has_s: ClassVar[float] = _ANSWER_S

    async def has(self, root: str) -> bool:
        """Marks it as used, too: garbage collection deletes the least recently used first."""
        return decoded(_Has, await self._call("has", self.has_s, root=root)).has

    async def missing(self, ids: Sequence[bytes]) -> list[bytes]:
        """The hashes whose contents are not on the node."""
        async with self._stream("missing") as (link, stream):
            upload = Upload(link, stream, self.name, self.what)
            step = wire.CHUNK // trees.ID_BYTES
            for first in range(0, len(ids), step):
                await upload.send(b"".join(ids[first : first + step]))
            await upload.end()
            answer = await stream.result()
        return [key for key, is_missing in zip(ids, _bits(answer, len(ids)), strict=True) if is_missing]

    async def send(
        self, root: str, ids: Sequence[bytes], store: ContentStore, limit_bytes: int, sent: Sent
    ) -> list[bytes]:
        """Returns what the node still lacks of the tree afterwards."""
        sizes = sum(store.locate(key).size for key in ids)
        if sizes <= _PUT_BYTES and len(ids) <= _MOST_PUT:
            with contextlib.suppress(_Busy):
                return await self._put(root, _Blocks(store, ids), limit_bytes, sent)
        return await self._send_stream(root, ids, store, limit_bytes, sent)

    async def _send_stream(
        self, root: str, ids: Sequence[bytes], store: ContentStore, limit_bytes: int, sent: Sent
    ) -> list[bytes]:
        sizes = sum(store.locate(key).size for key in ids)
        async with self._stream("receive", root=root, bytes=sizes, limit_bytes=limit_bytes) as (link, stream):
            upload = Upload(link, stream, self.name, self.what, WINDOW)
            thread = Thread("code")
            try:
                await self._upload(_Blocks(store, ids), upload, thread, sent)
                await upload.end()
            finally:
                thread.close()
            return _lacking(await stream.result(), sent)

    async def _put(self, root: str, blocks: _Blocks, limit_bytes: int, sent: Sent) -> list[bytes]:
        """In one call: setting up a stream would take longer than the transfer."""
        content = blocks.next() or b""
        about = {"root": root, "bytes": blocks.bytes, "limit_bytes": limit_bytes}
        try:
            answer = await self._call("put", _ANSWER_S, **about, block=base64.b64encode(content).decode())
        except RemoteFailure as error:
            if error.cause == "busy":
                raise _Busy from error
            raise
        sent.add(blocks, len(content))
        return _lacking(answer, sent)

    async def _upload(self, blocks: _Blocks, upload: Upload, thread: Thread, sent: Sent) -> None:
        began = time.monotonic()
        while upload.is_open and (content := await thread.do(blocks.next)) is not None:
            view = memoryview(content)
            for at in range(0, len(view), wire.CHUNK):
                await upload.send(bytes(view[at : at + wire.CHUNK]))
            sent.add(blocks, len(content))
            blocks.compression.note(time.monotonic() - began, blocks.bytes)
            began = time.monotonic()

    async def tidy(self, limit_bytes: int) -> Tidied:
        return decoded(Tidied, {"node": self.name, **await self._call("tidy", TIDY_S, limit_bytes=limit_bytes)})


class _Busy(Exception):
    """The node would have to wait: the contents are sent as a stream instead."""


class _Blocks:
    """The blocks to send; made in a thread, one at a time."""

    def __init__(self, store: ContentStore, ids: Sequence[bytes]) -> None:
        self.compression = Compression()
        self.keys: list[bytes] = []  # in the last block
        self.bytes = 0
        self._store = store
        # In the order on the disk.
        self._ids = sorted(ids, key=lambda key: store.locate(key)[:2], reverse=True)

    def next(self) -> bytes | None:
        if not self._ids:
            return None
        parts: list[bytes] = []
        self.keys, self.bytes = [], 0
        while self._ids and self.bytes < BLOCK:
            key = self._ids.pop()
            place, content = self._store.locate(key), self._store.read(key)
            parts += record(key, place.kind, content)
            self.keys.append(key)
            self.bytes += place.size
        return block(b"".join(parts), compressed=self.compression.is_compressed)


class Compression:
    """Decides whether to compress, by measuring the time per byte both ways during the transfer."""

    def __init__(self) -> None:
        self.is_compressed = False
        self._costs: dict[bool, float] = {}  # seconds per byte
        self._blocks = 0

    def note(self, seconds: float, size: int) -> None:
        cost = seconds / max(1, size)
        old = self._costs.get(self.is_compressed, cost)
        self._costs[self.is_compressed] = 0.5 * (old + cost)
        self._blocks += 1
        if len(self._costs) < 2:
            # Not tried if the link is faster than compressing can be.
            self.is_compressed = cost > _LEAST_COST and self._blocks > _FIRST_BLOCKS
        else:
            better = self._costs[True] < self._costs[False]
            self.is_compressed = better if self._blocks % _AGAIN_BLOCKS else not better


def _bits(answer: dict[str, Any], count: int) -> list[bool]:
    try:
        bits = base64.b64decode(str(answer.get("missing")), validate=True)
    except binascii.Error:
        bits = b""
    if len(bits) != -(-count // 8):
        raise RemoteFailure("invalid answer about contents", cause="damaged")
    return [bool(bits[at >> 3] >> (at & 7) & 1) for at in range(count)]


def _lacking(answer: dict[str, Any], sent: Sent) -> list[bytes]:
    received = decoded(_Received, answer)
    sent.bad += received.bad
    try:
        return [trees.parse_id(text) for text in received.lacking]
    except ValueError as error:
        raise RemoteFailure(f"invalid answer about contents: {error}", cause="damaged") from error


def decoded(cls: type[T], answer: Any) -> T:
    try:
        return decode(cls, answer)
    except DecodeError as error:
        raise RemoteFailure(f"invalid answer about contents: {error}", cause="damaged") from error
