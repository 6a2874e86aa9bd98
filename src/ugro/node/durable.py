"""Small files that outlive crashes and full disks: whole or not at all, locked by the kernel, or changed in place.

It knows nothing of runs; ``rundir`` says which file means what.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import time
import zlib

from ugro.node import foreign
from ugro.node.program import Refused

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional

_PAUSE_S = 0.005
_TORN_READS = 200
_DIGITS = 39  # as many as a boot id has
_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

_MOST_BYTES = 64 << 20  # of a record: a job may have put anything in its place


def write_json(path: str, value: Dict[str, Any], *, is_lasting: bool = True) -> None:
    """A reader sees the old file or the new one; ``is_lasting``: also after a power cut."""
    fresh = "%s.%d.new" % (path, os.getpid())
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(fd, json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape"))
            if is_lasting:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    if is_lasting:
        sync_folder(os.path.dirname(path))


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """None when there is no such file, or nothing in it that was written by ``write_json``."""
    try:
        with open(path, "rb", opener=_open) as file:
            value = foreign.parsed(file.read(_MOST_BYTES + 1).decode("utf-8", "surrogateescape"), _MOST_BYTES)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _open(path: str, flags: int) -> int:
    """Does not wait for a writer: a job may have put a pipe in the place of a record."""
    return os.open(path, flags | os.O_NONBLOCK)


def write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(path: str) -> None:
    """Which names are in it; what is behind them is ``sync_file``'s."""
    sync_file(path, os.O_DIRECTORY)


def sync_file(path: str, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def take_space(path: str, size: int) -> None:
    """So much can be written to this file later, even if the disk is full by then."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Some file systems promise the space and take none: what they took is what counts.
        if _libc.fallocate(fd, _KEEP_SIZE, 0, size) != 0 or os.fstat(fd).st_blocks * 512 < size:
            # Not zeros: some file systems would store none of them. Synced: others look for space only then.
            write_all(fd, os.urandom(size))
            os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: str) -> None:
    """Only its owner may look into it; so into those above it that are made on the way."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def lock_within(fd: int, operation: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


@contextlib.contextmanager
def locked(path: str, timeout_s: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_within(fd, fcntl.LOCK_EX, timeout_s):
            raise Refused("busy", "%s is held by another process for more than %g s" % (path, timeout_s))
        yield
    finally:
        os.close(fd)


class Numbers:
    """A file of a few numbers, of fixed width and changed in place: a full disk cannot keep them from changing.

    Who writes holds a lock. Who reads need not: a checksum tells a reader that it came in the middle of a write.
    """

    def __init__(self, path: str, count: int, place: int = 0) -> None:
        """``place``: where in the file; there may be more of them in it."""
        self.path = path
        self._count = count
        self._place = place
        self._size = len(_line([0] * count))

    def read(self) -> List[int]:
        """Zeros when it was never written."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return [0] * self._count
        try:
            return self.read_from(fd)
        finally:
            os.close(fd)

    def write(self, *values: int, is_lasting: bool = True) -> None:
        """``is_lasting``: it must be there after a power cut."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_new = os.fstat(fd).st_size == 0
            self.write_to(fd, *values)
            if is_lasting:
                os.fsync(fd)
        finally:
            os.close(fd)
        if is_new and is_lasting:
            sync_folder(os.path.dirname(self.path))

    def write_to(self, fd: int, *values: int) -> None:
        os.pwrite(fd, _line(values), self._place)

    def read_from(self, fd: int) -> List[int]:
        for _ in range(_TORN_READS):
            line = os.pread(fd, self._size, self._place)
            if not line.strip(b"\0"):  # nothing, or a place that was passed over
                return [0] * self._count
            fields = line.split()
            with contextlib.suppress(ValueError):
                values = [int(field) for field in fields[:-1]]
                if len(values) == self._count and line == _line(values):
                    return values
            time.sleep(_PAUSE_S / 10)
        raise OSError(errno.EIO, "its contents are damaged", self.path)


def _line(values: Any) -> bytes:
    numbers = " ".join("%0*d" % (_DIGITS, value) for value in values)
    return ("%s %08x\n" % (numbers, zlib.crc32(numbers.encode()))).encode()
