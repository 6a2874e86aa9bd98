"""A tree: the content of a folder as one value, identified by its hash. Folders below it are trees, too.

An entry is a name, a mode and a body: the hashes of a file's chunks, the hash of a folder's tree, or a link's target.
The same names, modes and contents are the same bytes on every machine; times and owners are not included. Node and
agent use this module, and check what they receive: a name never leads out of its folder.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import zlib
from typing import Any, Iterator, List, NamedTuple, Tuple

CHUNK = 4 << 20  # longer files are split, so that only what was appended is sent
ID_BYTES = 32
FILE, FOLDER, LINK = 1, 2, 3
CONTENT, TREE = 1, 2  # what a hash names
MOST_DEPTH = 200
_HEAD = struct.Struct(">BHHQI")  # kind, mode, bytes of the name, bytes of the file, bytes of the body
_ID = re.compile(r"[0-9a-f]{64}")
# The content of a file never has the hash of a tree.
_TREE_MARK = b"ugro tree 1\n"


class BadTree(ValueError):
    """Bytes that are not a tree; the text is for the user."""


class TreeEntry(NamedTuple):
    name: bytes
    kind: int
    mode: int
    size: int  # of a file
    body: bytes

    @property
    def chunks(self) -> Iterator[bytes]:
        return (self.body[at : at + ID_BYTES] for at in range(0, len(self.body), ID_BYTES))


@functools.lru_cache(maxsize=None)
def _sha256() -> Any:
    # Imported when needed: most node programs never hash, and each fork would carry OpenSSL along.
    import hashlib

    return hashlib.sha256


def identify(kind: int, content: Any) -> bytes:
    """The hash of a content or of a tree."""
    digest = _sha256()(_TREE_MARK) if kind == TREE else _sha256()()
    digest.update(content)
    found: bytes = digest.digest()
    return found


def encode(entries: List[TreeEntry]) -> bytes:
    parts = []
    for name, kind, mode, size, body in sorted(entries):
        parts += [_HEAD.pack(kind, mode, len(name), size, len(body)), name, body]
    return b"".join(parts)


def decode(content: bytes) -> List[TreeEntry]:
    entries: List[TreeEntry] = []
    at, end = 0, len(content)
    while at < end:
        if end - at < _HEAD.size:
            raise BadTree("it is cut short")
        kind, mode, name_bytes, size, body_bytes = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        name, body = content[at : at + name_bytes], content[at + name_bytes : at + name_bytes + body_bytes]
        at += name_bytes + body_bytes
        entry = TreeEntry(name, kind, mode, size, body)
        if at > end or not _is_valid(entry) or (entries and entries[-1].name >= name):
            raise BadTree("invalid entry: %.200r" % os.fsdecode(name))
        entries.append(entry)
    return entries


def _is_valid(entry: TreeEntry) -> bool:
    name, kind, mode, size, body = entry
    if not 0 < len(name) < 256 or name in (b".", b"..") or b"/" in name or b"\0" in name or mode > 0o777:
        return False
    if kind == FILE:
        return len(body) == ID_BYTES * -(-size // CHUNK)
    if kind == FOLDER:
        return size == 0 and len(body) == ID_BYTES
    return kind == LINK and size == 0 and 0 < len(body) < 4096 and b"\0" not in body


def parse_id(text: Any) -> bytes:
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise ValueError("not the hash of a tree: %.80r" % text)
    return bytes.fromhex(text)


# --- stream -----------------------------------------------------------------------------------------------------------
# The stream in which contents are sent: blocks of many small ones or of one large one, compressed if that saves time.
#
# Node and agent use this module. The receiver trusts nothing: sizes are bounded, and every content is checked by hash.


BLOCK = 1 << 20
MOST_CONTENT = 64 << 20  # of a tree; a file's are chunks
_MOST_BLOCK = MOST_CONTENT + BLOCK + 4096
_STREAM_HEAD = struct.Struct(">BII")  # whether it is compressed, bytes sent, bytes of content
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
            return _STREAM_HEAD.pack(1, len(smaller), len(content)) + smaller
    return _STREAM_HEAD.pack(0, len(content), len(content)) + content


class BlockReader:
    """Splits the stream into records. Contents that do not match their hash are dropped and counted."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.bad = 0

    def feed(self, piece: bytes) -> Iterator[Record]:
        self._buffer += piece
        while len(self._buffer) >= _STREAM_HEAD.size:
            is_small, wire_bytes, whole_bytes = _STREAM_HEAD.unpack_from(self._buffer)
            if is_small > 1 or max(wire_bytes, whole_bytes) > _MOST_BLOCK:
                raise StreamError("a block of %d bytes" % max(wire_bytes, whole_bytes))
            end = _STREAM_HEAD.size + wire_bytes
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[_STREAM_HEAD.size : end])
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
            if kind not in (CONTENT, TREE) or at + size > end:
                raise StreamError("a content of %d bytes" % size)
            if identify(kind, view[at : at + size]) == key:
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
