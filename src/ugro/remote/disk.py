"""Room on the disk of a folder, and words for when there is none. Loaded with the node program: imports little."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False  # see wire.py
if TYPE_CHECKING:
    from typing import Tuple

SPARE_BYTES = 64 << 20  # left free, for what others write meanwhile
NO_SPACE = "no-space"  # the kind of a refusal
# With less, not even a line of a log may fit: blocks are taken whole.
_NOTHING_BYTES = 64 * 1024
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def free_bytes(path: str) -> int:
    usage = os.statvfs(path)
    return usage.f_bavail * usage.f_frsize


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def has_nothing_left(path: str) -> bool:
    """Whether a program that writes there fails now, for want of space or of files."""
    try:
        usage = os.statvfs(path)
    except OSError:
        return False
    return usage.f_bavail * usage.f_frsize < _NOTHING_BYTES or not _has_files(usage)


def shortage(path: str, size: int, what: str, spare: int = SPARE_BYTES) -> str | None:
    """Why ``size`` bytes of ``what`` do not fit, ``spare`` left; None if they do."""
    free = free_bytes(path)
    if size + spare <= free:
        return None
    needs = "%s needs %s, and %s are kept free" % (what, in_words(size), in_words(spare))
    return "the disk of %s is full: %s free; %s" % (_shown(path), in_words(free), needs)


def refusal(error: OSError, path: str, prefix: str = "") -> Tuple[str, str]:
    """The kind and the words of a call that failed by it; ``path`` is on the disk that it wrote to."""
    if not is_full(error):
        return "os", prefix + str(error)
    if error.errno == errno.EDQUOT:  # the disk itself may be almost empty
        return NO_SPACE, "%sthe disk quota is used up in %s" % (prefix, _shown(path))
    return NO_SPACE, "%sthe disk of %s is full%s" % (prefix, _shown(path), _left(path))


def _left(path: str) -> str:
    try:
        usage = os.statvfs(path)
    except OSError:
        return ""
    if not _has_files(usage):
        return ": it has no inodes left for more files"
    return ": %s free" % in_words(usage.f_bavail * usage.f_frsize)


def _has_files(usage: os.statvfs_result) -> bool:
    return usage.f_favail > 0 or usage.f_files == 0  # some file systems do not count files


def _shown(path: str) -> str:
    """UGRO's folder as users know it, without what is inside."""
    return path.partition("/.ugro/")[0]


def in_words(size: float) -> str:
    if size < 1024:
        return "%d B" % size
    for unit in _UNITS:
        size /= 1024
        if size < 999.95 or unit == _UNITS[-1]:
            break
    return "%.1f %s" % (size, unit)
