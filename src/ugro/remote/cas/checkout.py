"""A tree becomes a folder: each file a copy of its own, so that whoever writes over one harms nobody else.

No hard links to what is stored: root writes through a file's mode, and everybody else would find files that cannot be
written where they were writable at home. File systems that share blocks between copies do so for large files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import List, Tuple

from ugro.remote import trees
from ugro.remote.cas.packs import ContentStore, Place
from ugro.remote.trees import Entry

_SHARED_BYTES = 256 * 1024  # from here on the kernel copies, and shares where it can
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TooLarge(Exception):
    """There are more entries than were allowed."""


def check_out(store: ContentStore, root: bytes, folder: str) -> None:
    """In one step: ``folder`` is empty or not there before, and whole afterwards. Filled already, it is left alone."""
    fresh = "%s.%s" % (folder, os.urandom(6).hex())
    os.mkdir(fresh, 0o700)
    try:
        fill(store, root, fresh)
        with contextlib.suppress(OSError):  # somebody else was there first
            os.rename(fresh, folder)
            return
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def fill(store: ContentStore, root: bytes, folder: str, most_entries: int = 1 << 40) -> None:
    """Into an empty folder of ours. Raises ``Lacking`` where something is not in the store."""
    # Modes as they were at home, at once: a call for each file that sets them afterwards would cost as much again.
    umask = os.umask(0)
    try:
        _Filling(store, most_entries).fill(os.open(folder, _FOLDER), store.entries(root), 0)
    finally:
        os.umask(umask)


class _Filling:
    def __init__(self, store: ContentStore, most_entries: int) -> None:
        self._store = store
        self._left = most_entries

    def fill(self, fd: int, entries: List[Entry], depth: int) -> None:
        """Closes the descriptor."""
        try:
            self._left -= len(entries)
            if self._left < 0 or depth > trees.MOST_DEPTH:
                raise TooLarge
            for entry in entries:
                if entry.kind == trees.FILE:
                    self._write(fd, entry)
                elif entry.kind == trees.LINK:
                    os.symlink(entry.body, entry.name, dir_fd=fd)
                else:
                    self._folder(fd, entry, depth)
        finally:
            os.close(fd)

    def _folder(self, fd: int, entry: Entry, depth: int) -> None:
        mode = entry.mode | 0o700  # ours to fill and to delete
        os.mkdir(entry.name, mode, dir_fd=fd)
        self.fill(os.open(entry.name, _FOLDER, dir_fd=fd), self._store.entries(entry.body), depth + 1)

    def _write(self, fd: int, entry: Entry) -> None:
        file = os.open(entry.name, _NEW, entry.mode, dir_fd=fd)
        try:
            for chunk in entry.chunks:
                self._copy(chunk, file)
        finally:
            os.close(file)

    def _copy(self, chunk: bytes, file: int) -> None:
        place = self._store.place(chunk)
        shared = _share(self._store.path(place), place, file) if place.size >= _SHARED_BYTES else 0
        content = memoryview(self._store.read(chunk))[shared:]
        while content:
            content = content[os.write(file, content) :]


def _share(pack: str, place: Place, file: int) -> int:
    """How many bytes were copied; where the kernel cannot, we can."""
    shared = 0
    source = os.open(pack, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while shared < place.size:
            copied = os.copy_file_range(source, file, place.size - shared, place.offset + shared)
            if not copied:
                break
            shared += copied
    except (OSError, AttributeError):  # another file system, an older kernel or C library
        pass
    finally:
        os.close(source)
    return shared


def count(store: ContentStore, root: bytes) -> Tuple[int, int]:
    """Files and bytes below a tree."""
    files = size = 0
    todo = [root]
    while todo:
        for entry in store.entries(todo.pop()):
            if entry.kind == trees.FOLDER:
                todo.append(entry.body)
            else:
                files += 1
                size += entry.size
    return files, size
