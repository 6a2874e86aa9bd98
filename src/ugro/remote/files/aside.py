"""Files that are linked, set aside and deleted: a name is given or taken in one step, the rest may take its time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from typing import AnyStr, Callable, List

from ugro.remote import durable
from ugro.remote.files import listing

ARRIVING = ".arriving."
REMOVING = ".removing."


def link(path: bytes, target: bytes) -> None:
    os.link(path, target, follow_symlinks=False)


def link_or_copy(path: bytes, target: bytes) -> None:
    try:
        link(path, target)
    except OSError:
        shutil.copy2(path, target, follow_symlinks=False)


def link_all(path: str, root: str, place: Callable[[bytes, bytes], None] = link) -> None:
    """A new folder with hard links to the files of a folder, or to the one file."""
    os.mkdir(root, 0o700)
    base = path if os.path.isdir(path) else os.path.dirname(path)
    for file in listing.files_of(path):
        target = os.path.join(os.fsencode(root), file.name)
        if file.is_folder:
            os.mkdir(target, 0o700)
        else:
            place(os.path.join(os.fsencode(base), file.name), target)


def move(path: AnyStr, target: AnyStr) -> None:
    """A folder that forbids it is opened: its user made it, and we are that user."""
    try:
        os.rename(path, target)
    except PermissionError:
        _open_up(os.path.dirname(path))
        _open_up(path)
        os.rename(path, target)


def beside(path: str, mark: str) -> str:
    return os.path.join(os.path.dirname(path), mark + os.urandom(8).hex())


def names_in(folder: str) -> List[str]:
    """None of one that is not there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(folder))
    return []


def remove_all(folder: str, *marks: str) -> None:
    """Those of these names that no process has locked."""
    for path in [os.path.join(folder, name) for name in names_in(folder) if name.startswith(marks)]:
        if os.path.isdir(path) and not os.path.islink(path):
            if not _is_held(path):
                _remove(path)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for folder, _, _ in os.walk(path):
            _open_up(folder)
        shutil.rmtree(path, ignore_errors=True)


def _open_up(path: AnyStr) -> None:
    with contextlib.suppress(OSError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            os.chmod(path, stat.S_IMODE(mode) | stat.S_IRWXU)


def _is_held(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not durable.lock_within(fd, fcntl.LOCK_EX, 0)
    finally:
        os.close(fd)
