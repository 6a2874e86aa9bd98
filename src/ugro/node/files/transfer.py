"""Files that arrive by a resumable stream, written below a folder. Node and agent use this module.

A file that grew is extended in place. Any other is written in a second folder and renamed into place when it is
complete. No link is followed: a name stays below its folder, whatever is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import struct
import time
import zlib
from typing import Callable, Generator, Iterator, List, NamedTuple, Optional, Protocol, Sequence, Tuple

from ugro.node import durable
from ugro.node.files import listing
from ugro.node.files.listing import MOST_BYTES, RunFile

# --- resumable --------------------------------------------------------------------------------------------------------
# Files as one stream of bytes, each from the offset that its reader already has.
#
# Each file is a header, as many bytes as the header says, and a trailer with the outcome and a checksum. Node and agent
# use this module in both directions. The reader trusts nothing: it accepts the files it asked for, in that order, and
# never more bytes than announced.


CHUNK = 64 * 1024
BLOCK = 64 * 1024  # the first and the last block before an offset are compared to see whether a file only grew
WHOLE, UNSETTLED, BROKEN = 0, 1, 2  # the file did not change; it may still be changing; it must not be used
_HEADER = struct.Struct(">IBQQQqQI")
_TRAILER = struct.Struct(">BI")
_CONTENT, _PROBLEM = 1, 2
_MOST_PROBLEM_BYTES = 1000
# The clock of a file system ticks slowly: a file that changed just now may change again and look the same.
_SETTLED_NS = 100_000_000


class StreamError(Exception):
    """The stream is not one that can have been sent; the text is for the user."""


class Head(NamedTuple):
    """Announces the bytes of a file from ``offset`` on, or the ``problem`` because of which none follow."""

    number: int
    offset: int
    length: int
    size: int
    changed_ns: int
    inode: int
    mode: int
    problem: Optional[str] = None


class Sink(Protocol):
    """Receives the files of a stream, one after the other."""

    def begin(self, head: Head) -> None: ...

    def write(self, piece: bytes) -> None: ...

    def end(self, state: int) -> None: ...


def check_of(fd: int, offset: int) -> str:
    """Equal on both sides if the first and the last block before ``offset`` are."""
    digest = hashlib.sha256(os.pread(fd, min(BLOCK, offset), 0))
    digest.update(os.pread(fd, min(BLOCK, offset), max(0, offset - BLOCK)))
    return digest.hexdigest()


def is_all_checked(offset: int) -> bool:
    """Whether the two blocks cover everything before ``offset``."""
    return offset <= 2 * BLOCK


def content_hash(fd: int) -> str:
    digest = hashlib.sha256()
    offset = 0
    while True:
        piece = os.pread(fd, 1 << 20, offset)
        if not piece:
            return digest.hexdigest()
        digest.update(piece)
        offset += len(piece)


def send(number: int, fd: int, offset: int, check: str) -> Iterator[bytes]:
    """From ``offset`` if the bytes before it match ``check``, otherwise from the beginning."""
    before = os.fstat(fd)
    if not 0 < offset <= before.st_size or check_of(fd, offset) != check:
        offset = 0
    about = (before.st_size, before.st_mtime_ns, before.st_ino, before.st_mode & 0o777)
    header = _HEADER.pack(number, _CONTENT, offset, before.st_size - offset, *about)
    checksum = zlib.crc32(header)
    yield header
    is_cut = False
    while offset < before.st_size:
        most = min(CHUNK, before.st_size - offset)
        piece = b"" if is_cut else os.pread(fd, most, offset)
        if not piece:  # it was truncated: zeros follow, as many as announced, and must not be used
            is_cut, piece = True, bytes(most)
        offset += len(piece)
        checksum = zlib.crc32(piece, checksum)
        yield piece
    yield _trailer(BROKEN if is_cut else _state(before, os.fstat(fd)), checksum)


def send_problem(number: int, text: str) -> bytes:
    content = text.encode("utf-8", "replace")[:_MOST_PROBLEM_BYTES]
    sent = _HEADER.pack(number, _PROBLEM, 0, len(content), 0, 0, 0, 0) + content
    return sent + _trailer(WHOLE, zlib.crc32(sent))


def _state(before: os.stat_result, after: os.stat_result) -> int:
    if after.st_size < before.st_size:
        return BROKEN
    is_same = (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    # Also one of the future, by a clock that was set back: what is written now gets another time.
    return WHOLE if is_same and abs(time.time_ns() - after.st_mtime_ns) > _SETTLED_NS else UNSETTLED


def _trailer(state: int, checksum: int) -> bytes:
    return _TRAILER.pack(state, zlib.crc32(bytes([state]), checksum))


class Reader:
    """Splits the stream into files. ``offsets``: what was asked for, one for each file."""

    def __init__(self, offsets: List[int], sink: Sink) -> None:
        self._offsets = offsets
        self._sink = sink
        self._next = 0
        self._buffer = b""
        self._left: Optional[int] = None  # bytes of the open file; None: a header comes next
        self._checksum = 0
        self._problem: Optional[Head] = None

    def feed(self, content: bytes) -> None:
        content = self._buffer + content
        self._buffer = b""
        while content:
            if self._left:
                piece = content[: self._left]
                self._take(piece)
                self._left -= len(piece)
                content = content[len(piece) :]
                continue
            size = _HEADER.size if self._left is None else _TRAILER.size
            if len(content) < size:
                self._buffer = content
                return
            (self._open if self._left is None else self._close)(content[:size])
            content = content[size:]

    def finish(self) -> None:
        if self._buffer or self._left is not None or self._next != len(self._offsets):
            raise StreamError("the transfer was cut short")

    def _open(self, header: bytes) -> None:
        number, kind, offset, length, size, changed_ns, inode, mode = _HEADER.unpack(header)
        if number != self._next or number >= len(self._offsets):
            raise StreamError("a file came that was not asked for")
        self._next += 1
        self._left = length
        self._checksum = zlib.crc32(header)
        if kind == _PROBLEM and length <= _MOST_PROBLEM_BYTES:
            self._problem = Head(number, 0, length, 0, 0, 0, 0, "")
            return
        is_valid = kind == _CONTENT and offset in (0, self._offsets[number]) and offset + length == size < MOST_BYTES
        if not is_valid:
            raise StreamError("invalid header of a file")
        self._sink.begin(Head(number, offset, length, size, changed_ns, inode, mode & 0o777))

    def _take(self, piece: bytes) -> None:
        self._checksum = zlib.crc32(piece, self._checksum)
        if self._problem is not None:
            text = (self._problem.problem or "") + piece.decode("utf-8", "replace")
            self._problem = self._problem._replace(problem=text)
        else:
            self._sink.write(piece)

    def _close(self, trailer: bytes) -> None:
        state, _ = _TRAILER.unpack(trailer)
        if trailer != _trailer(state, self._checksum) or state not in (WHOLE, UNSETTLED, BROKEN):
            raise StreamError("a file was damaged during the transfer")
        self._left = None
        if self._problem is None:
            self._sink.end(state)
        else:
            head, self._problem = self._problem, None
            self._sink.begin(head)


# --- received ---------------------------------------------------------------------------------------------------------


_SYNC_BYTES = 64 << 20  # written back as it arrives: one sync after many gigabytes would take minutes
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINE_BYTES = 64 * 1024


class Folder:
    """``root`` has the files that have arrived, ``partial`` those that are on their way."""

    def __init__(self, root: str, partial: str) -> None:
        self.root = os.fsencode(root)
        self.partial = os.fsencode(partial)

    def path(self, name: bytes) -> bytes:
        return os.path.join(self.root, name)

    def base(self, name: bytes) -> Optional[bytes]:
        """What has arrived of a file so far: the incomplete one, else the one in its place."""
        for path in (self._partial(name), self.path(name)):
            if is_file(path):
                return path
        return None

    def open_base(self, name: bytes, *, is_new: bool) -> Tuple[int, bool]:
        """Opened for writing; and whether it still has to be renamed into place."""
        base = None if is_new else self.base(name)
        if base is not None and base != self._partial(name):
            return os.open(base, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), False
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._partial(name), flags | (os.O_TRUNC if is_new else 0), 0o600), True

    def place(self, name: bytes) -> None:
        """Renames a complete file into place, whatever was there."""
        *folders, last = name.split(b"/")
        with self._entered(folders) as parent:
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(last, dir_fd=parent).st_mode):
                    shutil.rmtree(self.path(name))
            os.rename(self._partial(name), last, dst_dir_fd=parent)

    def make(self, name: bytes) -> None:
        """A folder, even if no file is in it."""
        with self._entered(name.rstrip(b"/").split(b"/")):
            pass

    @contextlib.contextmanager
    def _entered(self, folders: Sequence[bytes]) -> Iterator[int]:
        fds = [os.open(self.root, _FOLDER)]
        try:
            for folder in folders:
                fds.append(_enter(folder, fds[-1]))
            yield fds[-1]
        finally:
            for fd in fds:
                os.close(fd)

    def _partial(self, name: bytes) -> bytes:
        return os.path.join(self.partial, hashlib.sha256(name).hexdigest()[:32].encode())


class Writer:
    """The sink of one stream. ``expect_room`` raises when so many bytes do not fit; ``ended`` gets every file."""

    def __init__(
        self,
        folder: Folder,
        names: Sequence[bytes],
        expect_room: Callable[[int], None],
        ended: Callable[[bytes, Head, int], None],
    ) -> None:
        self._folder = folder
        self._names = names
        self._expect_room = expect_room
        self._ended = ended
        self._head: Optional[Head] = None
        self._fd = -1
        self._must_place = False
        self._offset = 0
        self._unsynced = 0

    def begin(self, head: Head) -> None:
        name = self._names[head.number]
        if head.problem is not None:
            self._ended(name, head, BROKEN)
            return
        self._expect_room(head.length)
        self._head, self._offset = head, head.offset
        self._fd, self._must_place = self._folder.open_base(name, is_new=head.offset == 0)

    def write(self, piece: bytes) -> None:
        done = 0
        while done < len(piece):
            done += os.pwrite(self._fd, piece[done:], self._offset + done)
        self._offset += len(piece)
        self._unsynced += len(piece)
        if self._unsynced > _SYNC_BYTES:
            self._unsynced = 0
            os.fdatasync(self._fd)
            self._expect_room(len(piece))

    def end(self, state: int) -> None:
        assert self._head is not None
        head, self._head = self._head, None
        name = self._names[head.number]
        if state == BROKEN:
            os.ftruncate(self._fd, head.offset)
        else:
            os.ftruncate(self._fd, head.size)
            os.fchmod(self._fd, head.mode | 0o600)
            with contextlib.suppress(OverflowError, OSError):
                os.utime(self._fd, ns=(head.changed_ns, head.changed_ns))
            if self._must_place:
                self._folder.place(name)
        self._ended(name, head, state)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_file(path: bytes) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def sync_tree(folder: str) -> None:
    """When this returns, all files below the folder, and their names, are on the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            durable.sync_file(os.path.join(parent, name))
        durable.sync_folder(parent)


# --- a whole folder in one stream: its listing, an empty line, its files ----------------------------------------


def send_whole(folder: str) -> Generator[bytes, None, None]:
    """Pieces of CHUNK bytes, each read only when it is asked for."""
    buffer = bytearray()
    for piece in _pieces(os.fsencode(folder)):
        buffer += piece
        while len(buffer) >= CHUNK:
            yield bytes(buffer[: CHUNK])
            del buffer[: CHUNK]
    yield bytes(buffer)


def _pieces(folder: bytes) -> Iterator[bytes]:
    files = listing.files_of(os.fsdecode(folder))
    yield from listing.encoded(files)
    yield b"\n"
    for number, file in enumerate(file for file in files if not file.is_folder):
        # Not blocking, and not through a link: it may have become something else since it was listed.
        fd = os.open(os.path.join(folder, file.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield from send(number, fd, 0, "")
        finally:
            os.close(fd)


def receive_whole(folder: str, most_bytes: int, pieces: Iterator[bytes]) -> str:
    """Into a new folder; returns the path of what arrived, which is complete and on the disk."""
    root, partial = os.path.join(folder, "content"), os.path.join(folder, "partial")
    os.mkdir(root, 0o700)
    os.mkdir(partial, 0o700)
    files, rest = _read_listing(pieces, most_bytes)
    received = Folder(root, partial)
    for file in files:
        if file.is_folder:
            received.make(file.name)
    names = [file.name for file in files if not file.is_folder]
    writer = Writer(received, names, lambda size: None, _expect_whole)
    reader = Reader([0] * len(names), writer)
    try:
        reader.feed(rest)
        for piece in pieces:
            reader.feed(piece)
        reader.finish()
    finally:
        writer.close()
    expect_same(root, files)
    sync_tree(root)
    return root


def expect_same(root: str, files: Sequence[RunFile]) -> None:
    """A listing that names a file twice, or a file as a folder, is not what can be there afterwards."""
    if sorted(file[:2] for file in listing.files_of(root)) != sorted(file[:2] for file in files):
        raise StreamError("what arrived is not what was listed")


def _expect_whole(name: bytes, head: Head, state: int) -> None:
    if state == BROKEN:
        raise StreamError("%s changed while it was read" % listing.shown(name))


def _read_listing(pieces: Iterator[bytes], most_bytes: int) -> Tuple[List[RunFile], bytes]:
    files: List[RunFile] = []
    unread = b""
    for piece in pieces:
        *lines, unread = (unread + piece).split(b"\n")
        for number, line in enumerate(lines):
            if not line:
                return files, b"\n".join([*lines[number + 1 :], unread])
            files.append(_parsed(line))
            most_bytes -= files[-1].size
            if most_bytes < 0 or len(files) > listing.MOST_FILES:
                raise StreamError("it is larger than announced")
        if len(unread) > _MOST_LINE_BYTES:
            break
    raise StreamError("the transfer was cut short")


def _parsed(line: bytes) -> RunFile:
    try:
        return listing.parse(line)
    except ValueError as error:
        raise StreamError(str(error)) from error


def _enter(name: bytes, parent: int) -> int:
    """Opens a folder, made where there is none; a file of that name is deleted: on the node it is a folder by now."""
    for _ in range(2):
        try:
            return os.open(name, _FOLDER, dir_fd=parent)
        except FileNotFoundError:
            os.mkdir(name, 0o700, dir_fd=parent)
        except OSError:
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, _FOLDER, dir_fd=parent)
