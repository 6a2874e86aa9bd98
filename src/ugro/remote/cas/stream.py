"""The stream in which contents are sent: blocks of many small ones or of one large one, compressed if that saves time.

Node and agent use this module. The receiver trusts nothing: sizes are bounded, and every content is checked by hash.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Iterator, List, Tuple

from ugro.remote import trees

BLOCK = 1 << 20
MOST_CONTENT = 64 << 20  # of a tree; a file's are chunks
_MOST_BLOCK = MOST_CONTENT + BLOCK + 4096
_HEAD = struct.Struct(">BII")  # whether it is compressed, bytes sent, bytes of content
_RECORD = struct.Struct(">32sBI")  # hash, kind, bytes of content
_LEVEL = 1

Record = Tuple[bytes, int, bytes]  # hash, kind, content


class StreamError(Exception):
    """The stream is invalid; the text is for the user."""


def record(key: bytes, kind: int, content: Any) -> List[Any]:
    return [_RECORD.pack(key, kind, len(content)), content]


def block(content: bytes, *, compressed: bool) -> bytes:
    """Not compressed if that does not help."""
    if compressed:
        smaller = zlib.compress(content, _LEVEL)
        if len(smaller) < 0.9 * len(content):
            return _HEAD.pack(1, len(smaller), len(content)) + smaller
    return _HEAD.pack(0, len(content), len(content)) + content


class BlockReader:
    """Splits the stream into records. Contents that do not match their hash are dropped and counted."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.bad = 0

    def feed(self, piece: bytes) -> Iterator[Record]:
        self._buffer += piece
        while len(self._buffer) >= _HEAD.size:
            is_small, wire_bytes, whole_bytes = _HEAD.unpack_from(self._buffer)
            if is_small > 1 or max(wire_bytes, whole_bytes) > _MOST_BLOCK:
                raise StreamError("a block of %d bytes" % max(wire_bytes, whole_bytes))
            end = _HEAD.size + wire_bytes
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield from self._records(_expanded(content, whole_bytes) if is_small else content)

    def finish(self) -> None:
        if self._buffer:
            raise StreamError("it was cut short")

    def _records(self, content: bytes) -> Iterator[Record]:
        at, end = 0, len(content)
        view = memoryview(content)
        while at < end:
            if end - at < _RECORD.size:
                raise StreamError("a block that ends too soon")
            key, kind, size = _RECORD.unpack_from(content, at)
            at += _RECORD.size
            if kind not in (trees.CONTENT, trees.TREE) or at + size > end:
                raise StreamError("a content of %d bytes" % size)
            if trees.identify(kind, view[at : at + size]) == key:
                yield key, kind, bytes(view[at : at + size])
            else:
                self.bad += 1
            at += size


def _expanded(content: bytes, size: int) -> bytes:
    expander = zlib.decompressobj()
    try:
        whole = expander.decompress(content, size)
    except zlib.error as error:
        raise StreamError("a block that cannot be read: %s" % error) from error
    if len(whole) != size or expander.unconsumed_tail:
        raise StreamError("a block that is not as long as it says")
    return whole
