"""A forked process that has its own command line and environment in /proc, as if it had been started afresh.

The environment tells which processes are ours; a fork alone would show its parent's. Starting afresh takes twenty
times as long.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Dict, List

_SET_MM = 35
_SET_MM_MAP = 14
_NO_EXE = 0xFFFFFFFF
# Of /proc/self/stat, counted from the state on: where code, data and heap begin and end, and where the stack begins.
_CODE, _DATA, _HEAP, _STACK = (23, 24), (42, 43), 44, 25
_MAP = struct.Struct("=12QII")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = [ctypes.c_ssize_t]


class ProcessTitle:
    """Made before the fork, where that costs less; kept for good, since the kernel reads it whenever somebody looks."""

    def __init__(self, argv: List[bytes], env: Dict[bytes, bytes]) -> None:
        self.env = env
        command = b"".join(word + b"\0" for word in argv)
        variables = b"".join(b"%s=%s\0" % pair for pair in env.items())
        self._text = ctypes.create_string_buffer(command + variables)
        start = ctypes.addressof(self._text)
        middle = start + len(command)
        self._places = (start, middle, middle, middle + len(variables))

    def show(self) -> None:
        """``OSError`` where the kernel was built without it."""
        layout = _MAP.pack(*_memory(), *self._places, 0, 0, _NO_EXE)
        if _libc.prctl(_SET_MM, _SET_MM_MAP, layout, len(layout), 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _memory() -> List[int]:
    """What stays as it is; the kernel takes only all values at once."""
    with open("/proc/self/stat", "rb") as stat:
        text = stat.read()
    # The name is in brackets and may hold spaces and brackets itself.
    fields = text[text.rindex(b")") + 2 :].split()
    places = [*_CODE, *_DATA, _HEAP]
    return [*(int(fields[place]) for place in places), int(_libc.sbrk(0)), int(fields[_STACK])]
