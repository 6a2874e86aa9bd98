"""Writes a tree into a folder. Each file is a copy, so that overwriting one harms no other run.

There are no hard links into the store: root could write through them, and everybody else would get read-only files that
were writable on their machine. File systems that can share blocks between copies do so for large files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import List

from ugro.node import trees
from ugro.node.files.packs import ContentStore, Location
from ugro.node.trees import TreeEntry

_SHARED_BYTES = 256 * 1024  # larger ones are copied by the kernel, which shares blocks if it can
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TooLarge(Exception):
    """There are more entries than were allowed."""


def check_out(store: ContentStore, root: bytes, folder: str) -> None:
    """In one step: ``folder`` is empty or missing before, and complete afterwards. A filled one is left alone."""
    fresh = "%s.%s" % (folder, os.urandom(6).hex())
    os.mkdir(fresh, 0o700)
    try:
        fill(store, root, fresh)
        with contextlib.suppress(OSError):  # another process was first
            os.rename(fresh, folder)
            return
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def fill(store: ContentStore, root: bytes, folder: str, most_entries: int = 1 << 40) -> None:
    """Into an empty folder of ours. Raises ``Lacking`` if something is not in the store."""
    # Files are created with their modes: setting them afterwards would take twice as long.
    umask = os.umask(0)
    try:
        _Checkout(store, most_entries).fill(os.open(folder, _FOLDER), store.entries(root), 0)
    finally:
        os.umask(umask)


class _Checkout:
    def __init__(self, store: ContentStore, most_entries: int) -> None:
        self._store = store
        self._left = most_entries

    def fill(self, fd: int, entries: List[TreeEntry], depth: int) -> None:
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

    def _folder(self, fd: int, entry: TreeEntry, depth: int) -> None:
        mode = entry.mode | 0o700  # ours to fill and to delete
        os.mkdir(entry.name, mode, dir_fd=fd)
        self.fill(os.open(entry.name, _FOLDER, dir_fd=fd), self._store.entries(entry.body), depth + 1)

    def _write(self, fd: int, entry: TreeEntry) -> None:
        file = os.open(entry.name, _NEW, entry.mode, dir_fd=fd)
        try:
            for chunk in entry.chunks:
                self._copy(chunk, file)
        finally:
            os.close(file)

    def _copy(self, chunk: bytes, file: int) -> None:
        place = self._store.locate(chunk)
        shared = _share(self._store.path(place), place, file) if place.size >= _SHARED_BYTES else 0
        content = memoryview(self._store.read(chunk))[shared:]
        while content:
            content = content[os.write(file, content) :]


def _share(pack: str, place: Location, file: int) -> int:
    """How many bytes the kernel copied; the rest is ours."""
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
