"""A parcel: a file, or a folder with all that is below it, as one stream of bytes, and back again.

Regular files and folders only; a link or a device is refused by name. Each entry is a header, a path and the file's
bytes; the last one carries the SHA-256 of all before it. Both sides use this file, and neither trusts the other:
what is unpacked stays below one folder, is never written over, and is no larger than was said. A fingerprint
(paths, sizes, times of change) tells cheaply whether two of them are the same; times travel along for that.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from typing import Generator, Iterator, List, Tuple

CHUNK = 64 * 1024
MOST_ENTRIES = 100_000
MOST_DEPTH = 100
MOST_PATH_BYTES = 4096
_FOLDER, _FILE, _END = 1, 2, 3
_HEADER = struct.Struct(">BHHqQ")  # kind, bytes of the path, mode, time of change in ns, bytes of the content
# What is written is brought to the disk as it comes: one sync at the end of many gigabytes would take minutes.
_SYNC_BYTES = 64 << 20


class ParcelError(Exception):
    """It cannot be packed or unpacked; in words for the user."""


class _Entry:
    def __init__(self, relative: bytes, path: bytes) -> None:
        self.relative = relative
        self.path = path
        self.stat = os.lstat(path)
        self.is_folder = stat.S_ISDIR(self.stat.st_mode)
        if not self.is_folder and not stat.S_ISREG(self.stat.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(self.stat.st_mode) else "neither a file nor a folder"
            raise ParcelError("%s is %s; only files and folders can be sent" % (_shown(relative), what))
        self.size = 0 if self.is_folder else self.stat.st_size


def fingerprint(path: str) -> Tuple[str, int]:
    """The same for a file and for a folder that holds just this file; and how many bytes it has."""
    digest = hashlib.sha256()
    size = 0
    for entry in _entries(os.fsencode(path)):
        size += entry.size
        changed_ns = 0 if entry.is_folder else entry.stat.st_mtime_ns
        digest.update(b"%s\0%d %d %d\n" % (entry.relative, entry.is_folder, entry.size, changed_ns))
    return digest.hexdigest()[:32], size


def _entries(path: bytes) -> Iterator[_Entry]:
    # Not os.path.isdir, which would go through a link.
    is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    found = _below(path, b"") if is_folder else iter([_Entry(os.path.basename(path), path)])
    for number, entry in enumerate(found):
        if number >= MOST_ENTRIES:
            raise ParcelError("it has more than %d files and folders" % MOST_ENTRIES)
        yield entry


def _below(folder: bytes, prefix: bytes) -> Iterator[_Entry]:
    if prefix.count(b"/") > MOST_DEPTH:
        raise ParcelError("its folders are more than %d deep" % MOST_DEPTH)
    for name in sorted(os.listdir(folder)):
        entry = _Entry(prefix + name, os.path.join(folder, name))
        yield entry
        if entry.is_folder:
            yield from _below(entry.path, entry.relative + b"/")


def link(path: str, folder: str) -> None:
    """The same files once more, below an empty folder of the same file system; an OSError where that cannot be."""
    for entry in _entries(os.fsencode(path)):
        target = os.path.join(os.fsencode(folder), entry.relative)
        if entry.is_folder:
            os.mkdir(target, 0o700)
        else:
            os.link(entry.path, target, follow_symlinks=False)


def pack(path: str) -> Generator[bytes, None, None]:
    """Pieces of about CHUNK bytes, read only when the next one is asked for."""
    digest = hashlib.sha256()
    buffer = bytearray()
    for piece in _pieces(os.fsencode(path)):
        digest.update(piece)
        buffer += piece
        if len(buffer) >= CHUNK:
            yield bytes(buffer[:CHUNK])
            del buffer[:CHUNK]
    mark = digest.digest()
    yield bytes(buffer)
    yield _HEADER.pack(_END, len(mark), 0, 0, 0) + mark


def _pieces(path: bytes) -> Iterator[bytes]:
    for entry in _entries(path):
        kind = _FOLDER if entry.is_folder else _FILE
        mode = stat.S_IMODE(entry.stat.st_mode)
        yield _HEADER.pack(kind, len(entry.relative), mode, entry.stat.st_mtime_ns, entry.size) + entry.relative
        if not entry.is_folder:
            yield from _content(entry)


def _content(entry: _Entry) -> Iterator[bytes]:
    # Not blocking, and through no link: it may have become something else since we looked.
    fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        left = entry.size
        while left:
            piece = os.read(fd, min(CHUNK, left))
            if not piece:
                break
            left -= len(piece)
            yield piece
        now = os.fstat(fd)
        if left or (now.st_size, now.st_mtime_ns) != (entry.size, entry.stat.st_mtime_ns):
            raise ParcelError("%s changed while it was read" % _shown(entry.relative))
    finally:
        os.close(fd)


class Unpacker:
    """Writes what it is fed below a folder that is empty and nobody else's. Close it, however it went."""

    def __init__(self, folder: str, most_bytes: int, most_entries: int = MOST_ENTRIES) -> None:
        self._folder = os.fsencode(folder)
        self._left_bytes = most_bytes
        self._left_entries = most_entries
        self._digest = hashlib.sha256()
        self._head = bytearray()
        self._wanted = _HEADER.size
        self._fd = -1
        self._left = 0  # of the content of the file that is open
        self._unsynced = 0
        self._mode = 0
        self._changed_ns = 0
        self._is_whole = False

    def feed(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = self._write(view) if self._left else self._read_head(view)

    def finish(self) -> None:
        """All of it is there, and on the disk."""
        if not self._is_whole:
            raise ParcelError("it was cut short")
        for folder, _, _ in os.walk(self._folder, topdown=False):
            _sync_folder(folder)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_head(self, view: memoryview) -> memoryview:
        if self._is_whole:
            raise ParcelError("more came after its end")
        take = self._wanted - len(self._head)
        self._head += view[:take]
        if len(self._head) == self._wanted:
            if self._wanted == _HEADER.size:
                self._wanted += self._path_bytes()
            else:
                self._begin()
                self._head.clear()
                self._wanted = _HEADER.size
        return view[take:]

    def _path_bytes(self) -> int:
        _, length, _, _, _ = _HEADER.unpack(self._head)
        if not 0 < length <= MOST_PATH_BYTES:
            raise ParcelError("a path of %d bytes" % length)
        return int(length)

    def _begin(self) -> None:
        kind, _, mode, changed_ns, size = _HEADER.unpack_from(self._head)
        path = bytes(self._head[_HEADER.size :])
        if (kind, mode, changed_ns, size) == (_END, 0, 0, 0):
            self._end(path)
            return
        self._digest.update(self._head)
        self._left_bytes -= size
        self._left_entries -= 1
        if self._left_bytes < 0 or self._left_entries < 0:
            raise ParcelError("it is larger than was said")
        target = os.path.join(self._folder, *_parts(path))
        if kind == _FOLDER and size == 0:
            os.mkdir(target, 0o700)
            os.chmod(target, mode & 0o777 | 0o700)  # ours to delete, whatever its owner there may do
        elif kind == _FILE:
            self._open(target, mode, changed_ns, size)
        else:
            raise ParcelError("an entry of kind %d and %d bytes" % (kind, size))

    def _open(self, target: bytes, mode: int, changed_ns: int, size: int) -> None:
        self._fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._mode, self._changed_ns, self._left, self._unsynced = mode, changed_ns, size, 0
        if size == 0:
            self._end_file()

    def _write(self, view: memoryview) -> memoryview:
        written = os.write(self._fd, view[: self._left])
        self._digest.update(view[:written])
        self._left -= written
        self._unsynced += written
        if self._left == 0:
            self._end_file()
        elif self._unsynced >= _SYNC_BYTES:
            os.fdatasync(self._fd)
            self._unsynced = 0
        return view[written:]

    def _end_file(self) -> None:
        os.fchmod(self._fd, self._mode & 0o777 | 0o600)
        try:
            os.utime(self._fd, ns=(self._changed_ns, self._changed_ns))
        except OverflowError as error:
            raise ParcelError("no time is %d ns" % self._changed_ns) from error
        os.fsync(self._fd)
        self.close()

    def _end(self, mark: bytes) -> None:
        if mark != self._digest.digest():
            raise ParcelError("it was damaged on its way")
        self._is_whole = True


def _parts(path: bytes) -> List[bytes]:
    parts = path.split(b"/")
    if b"\0" in path or len(parts) > MOST_DEPTH + 1 or any(part in (b"", b".", b"..") for part in parts):
        raise ParcelError("a path that leads elsewhere: %s" % _shown(path))
    return parts


def _sync_folder(path: bytes) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _shown(path: bytes) -> str:
    return "%.200r" % os.fsdecode(path)
