"""Permissions that hold for root, too: root without the capabilities that ignore them is any other user."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Of a program that is run by root: it can read what its permissions let the owner read.
WITHOUT = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
_VERSION_3 = 0x20080522
_OVERRIDE, _READ_SEARCH = 1, 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Head(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def respected() -> Iterator[None]:
    """In this thread, and in those that it starts meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head, sets = _Head(_VERSION_3, 0), (_Sets * 2)()
    _check(libc.capget(ctypes.byref(head), sets))
    before = sets[0].effective
    sets[0].effective &= ~(1 << _OVERRIDE | 1 << _READ_SEARCH)
    _check(libc.capset(ctypes.byref(head), sets))
    try:
        yield
    finally:
        sets[0].effective = before
        _check(libc.capset(ctypes.byref(head), sets))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
