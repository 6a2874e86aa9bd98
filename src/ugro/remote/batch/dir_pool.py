"""A blank: a run's folder with all its files, before it is anybody's. A run begins by filling one in and moving it.

What a small run leaves becomes a blank again: on common file systems a new file costs ten times what an old one does,
and the more of them were deleted lately, the more.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import List

from ugro.remote import durable
from ugro.remote.state.rundir import LEAST_EXIT_BYTES

LOG = "logs/rank_0.log"
_FOLDERS = ("logs", "output", "work")
_LOGS = frozenset(("rank_0.log", "rank_0.log.cut"))
# As a run that is over has them, and as a blank has them.
_ENDED = {"spec.json": "spec.json", "lock": "lock", "state.json": "state.new", "exit.json": "exit.reserve"}
_KNOWN = frozenset((*_FOLDERS, *_ENDED, "claim"))
_NO_JSON = b"-"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def make(path: str) -> None:
    for name in ("", "/logs", "/output", "/work"):
        os.mkdir(path + name, 0o700)
    for name in ("spec.json", "lock", "state.new", "exit.reserve", LOG):
        os.close(os.open("%s/%s" % (path, name), _OPEN | os.O_CREAT, 0o600))
    durable.Numbers("%s/%s.cut" % (path, LOG), 3).write(0, 0, 0, is_lasting=False)


def delete(path: str) -> None:
    """One that was never used."""
    with contextlib.suppress(OSError):
        for name in ("spec.json", "lock", "state.new", "exit.reserve", LOG, LOG + ".cut"):
            os.unlink("%s/%s" % (path, name))
        for name in (*_FOLDERS, ""):
            os.rmdir("%s/%s" % (path, name))


def write(path: str, content: bytes) -> None:
    """Over what was there, so that a file system has nothing to look for."""
    fd = os.open(path, _OPEN)
    try:
        durable.write_all(fd, content)
        os.ftruncate(fd, len(content))
    finally:
        os.close(fd)


def reserve(path: str) -> None:
    """Space for the last word; what stands there is another run's and must not be taken for it."""
    fd = os.open(path + "/exit.reserve", _OPEN)
    try:
        has_space = os.fstat(fd).st_blocks * 512 >= LEAST_EXIT_BYTES
        os.pwrite(fd, _NO_JSON, 0)
    finally:
        os.close(fd)
    if not has_space:
        durable.take_space(path + "/exit.reserve", LEAST_EXIT_BYTES)


def take_back(run: str, path: str) -> bool:
    """A run that is over, nobody at it, becomes the blank ``path``. False when it is no longer what a blank was:
    then nothing is changed, or all that is left of it is at ``path``."""
    with contextlib.suppress(OSError):
        if not _is_plain(run):
            return False
        os.rename(run, path)
        os.unlink(path + "/claim")
        for name, blank in _ENDED.items():
            if name != blank:
                os.rename("%s/%s" % (path, name), "%s/%s" % (path, blank))
        return _is_emptied("%s/%s" % (path, LOG))
    return False


def _is_plain(folder: str) -> bool:
    """Whether it holds what we put there and nothing else: no link that leads away, none that keeps it elsewhere."""
    names: List[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            about = entry.stat(follow_symlinks=False)
            if entry.name in _FOLDERS:
                if stat.S_IFMT(about.st_mode) != stat.S_IFDIR or stat.S_IMODE(about.st_mode) != 0o700:
                    return False
            elif entry.name != "claim" and not _is_ours_alone(about):
                return False
    if len(names) != len(_KNOWN) or not _KNOWN.issuperset(names):
        return False
    if os.listdir(folder + "/output") or os.listdir(folder + "/work"):
        return False
    return set(os.listdir(folder + "/logs")) == _LOGS


def _is_ours_alone(about: os.stat_result) -> bool:
    return stat.S_IFMT(about.st_mode) == stat.S_IFREG and about.st_nlink == 1


def _is_emptied(log: str) -> bool:
    fd = os.open(log, _OPEN)
    try:
        about = os.fstat(fd)
        if not _is_ours_alone(about):
            return False
        # Closed as an empty file: one that was only just emptied would be written to the disk at its next closing.
        os.ftruncate(fd, 0)
        return True
    finally:
        os.close(fd)
