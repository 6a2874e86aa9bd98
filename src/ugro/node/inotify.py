"""The kernel's word that something changed in a folder, without looking at it again and again."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Iterator, NamedTuple

CLOSE_WRITE = 0x008
MOVED_FROM = 0x040
MOVED_TO = 0x080
CREATE = 0x100
DELETE = 0x200
DELETE_SELF = 0x400
MOVE_SELF = 0x800
OVERFLOW = 0x4000  # events were lost
IGNORED = 0x8000  # this watch is over: the folder is gone, or nobody wants it any more
_ONLY_FOLDERS = 0x01000000
_HEADER = struct.Struct("iIII")
_BUFFER = 64 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


class Event(NamedTuple):
    watch: int
    mask: int
    name: str


class Inotify:
    """``OSError`` where the kernel has none to give: a user may have 128 of them."""

    def __init__(self) -> None:
        self.fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def add(self, folder: str, mask: int) -> int:
        return _checked(_libc.inotify_add_watch(self.fd, os.fsencode(folder), mask | _ONLY_FOLDERS))

    def remove(self, watch: int) -> None:
        _libc.inotify_rm_watch(self.fd, watch)  # fails when the folder went first, and then all is well

    def read(self) -> Iterator[Event]:
        try:
            content = os.read(self.fd, _BUFFER)
        except BlockingIOError:
            return
        start = 0
        while start < len(content):
            watch, mask, _, length = _HEADER.unpack_from(content, start)
            start += _HEADER.size
            yield Event(watch, mask, os.fsdecode(content[start : start + length].rstrip(b"\0")))
            start += length

    def close(self) -> None:
        os.close(self.fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
