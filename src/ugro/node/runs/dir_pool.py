"""Folders for runs to come. A run begins by filling one in and renaming it to the run's own name.

The folder that a small run leaves is used again: on common file systems a new file costs ten times what an old one
does, and more the more of them were deleted lately.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import List

from ugro.node import durable
from ugro.node.process.terminate import ProcessName
from ugro.node.runs.rundir import AgentDir, RunDir

LOG = "logs/rank_0.log"
_MOST_FREE = 256
_FOLDERS = ("logs", "output", "work")
_LOGS = frozenset(("rank_0.log", "rank_0.log.cut"))
# Names in the folder of a run that is over, and in a free folder.
_ENDED = {"spec.json": "spec.json", "lock": "lock", "state.json": "state.new", "exit.json": "exit.reserve"}
_KNOWN = frozenset((*_FOLDERS, *_ENDED, "claim"))
_NO_JSON = b"-"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class DirPool:
    """The free folders of a node program. Their parent has its process's name: it shows when they are nobody's."""

    def __init__(self, agent: AgentDir) -> None:
        self._folder = os.path.join(agent.pool_path, str(ProcessName.own()))
        self._free: List[str] = []
        self._count = 0

    def take(self) -> str:
        """Empty when there is none."""
        return self._free.pop() if self._free else ""

    def give_back(self, path: str) -> None:
        if path and os.path.isdir(path):
            self._free.append(path)

    def take_over(self, run: RunDir) -> bool:
        """The folder of a run that is over and that nobody has open. False: it is to be removed as any other."""
        if len(self._free) >= _MOST_FREE:
            return False
        if not self._count:
            with contextlib.suppress(OSError):  # a full disk: then it is removed
                durable.make_folder(self._folder)
        self._count += 1
        path = "%s/%d" % (self._folder, self._count)
        if not clear(run.path, path):
            return False
        self._free.append(path)
        return True


def make(path: str) -> None:
    for name in ("", "/logs", "/output", "/work"):
        os.mkdir(path + name, 0o700)
    for name in ("spec.json", "lock", "state.new", "exit.reserve", LOG):
        os.close(os.open("%s/%s" % (path, name), _OPEN | os.O_CREAT, 0o600))
    durable.Numbers("%s/%s.cut" % (path, LOG), 3).write(0, 0, 0, is_lasting=False)


def delete(path: str) -> None:
    """A folder that was never used."""
    with contextlib.suppress(OSError):
        for name in ("spec.json", "lock", "state.new", "exit.reserve", LOG, LOG + ".cut"):
            os.unlink("%s/%s" % (path, name))
        for name in (*_FOLDERS, ""):
            os.rmdir("%s/%s" % (path, name))


def remove_log(path: str) -> None:
    """For a run without a rank 0."""
    os.unlink("%s/%s" % (path, LOG))
    os.unlink("%s/%s.cut" % (path, LOG))


def write(path: str, content: bytes) -> None:
    """Over what was there, so that the file system has no space to look for."""
    fd = os.open(path, _OPEN)
    try:
        durable.write_all(fd, content)
        os.ftruncate(fd, len(content))
    finally:
        os.close(fd)


def reserve_exit(path: str, size: int) -> None:
    """Takes the space for an exit record; what stands there is another run's and must not be taken for it."""
    fd = os.open(path + "/exit.reserve", _OPEN)
    try:
        has_space = os.fstat(fd).st_blocks * 512 >= size
        os.pwrite(fd, _NO_JSON, 0)
    finally:
        os.close(fd)
    if not has_space:
        durable.take_space(path + "/exit.reserve", size)


def clear(run: str, path: str) -> bool:
    """Makes the folder of a run that is over the free folder ``path``.

    False when the run has changed it: then it is unchanged, or what is left of it is at ``path``.
    """
    with contextlib.suppress(OSError):
        if not _is_plain(run):
            return False
        os.rename(run, path)
        os.unlink(path + "/claim")
        for name, free_name in _ENDED.items():
            if name != free_name:
                os.rename("%s/%s" % (path, name), "%s/%s" % (path, free_name))
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
