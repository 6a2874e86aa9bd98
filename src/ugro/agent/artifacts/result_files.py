"""Opens the collected files of a job. They were written on nodes: no link is followed, and no name leads elsewhere.

A name is the one that ``JobResults`` lists, where bytes that are not UTF-8 are written as ``\\xff``.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

from ugro.agent.artifacts.output_store import shown
from ugro.core.errors import NotFound
from ugro.core.results import Part

CHUNK_BYTES = 256 * 1024
LOG_TIMES = b".times"  # beside a log: the times of its lines
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: what a node sent under a file's name could be a pipe.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_result(parts: Sequence[Part], name: str) -> BinaryIO:
    """Raises NotFound for what is not a file below one of the parts. Blocks."""
    for part in parts:
        inside = _inside(part.name, name)
        if inside is not None:
            with suppress(OSError, ValueError):
                return _opened(os.fsencode(part.path), inside)
    raise NotFound("there is no such file among the results", hint="links and special files are not shown")


def size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """As many bytes as the file had when it was opened: it may grow while it is read."""
    while size > 0 and (piece := file.read(min(CHUNK_BYTES, size))):
        size -= len(piece)
        yield piece


def archive(parts: Sequence[Part], top: str) -> Generator[bytes]:
    """A tar of all files, below a folder ``top``, piece by piece. Blocks."""
    for name, file in opened_files(parts):
        with file:
            about = os.fstat(file.fileno())
            info = tarfile.TarInfo(os.fsdecode(os.fsencode(top) + b"/" + name))
            info.size, info.mtime, info.mode = about.st_size, int(about.st_mtime), 0o644
            yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
            yield from _padded(file, info.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _padded(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Exactly so many bytes, filled up to whole blocks. Zeros stand for those of a file that shrank meanwhile."""
    sent = 0
    for piece in pieces(file, size):
        sent += len(piece)
        yield piece
    missing = -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE - sent
    while missing > 0:
        yield bytes(min(missing, CHUNK_BYTES))
        missing -= CHUNK_BYTES


def opened_files(parts: Sequence[Part]) -> Iterator[tuple[bytes, BinaryIO]]:
    """All files with their names; the caller closes them. Blocks."""
    for part in parts:
        own, root = os.fsencode(part.name), os.fsencode(part.path)
        with suppress(OSError):
            yield own, _opened(root, [])
            continue
        for inside in _names(root):
            if not (own == b"logs" and os.fsencode(inside[-1]).endswith(LOG_TIMES)):
                with suppress(OSError):
                    yield os.path.join(own, *map(os.fsencode, inside)), _opened(root, inside)


def _names(root: bytes) -> Iterator[list[str]]:
    """The files below a folder, which may be deeper than there are descriptors; none if there is no such folder."""
    folders: list[list[str]] = [[]]
    while folders:
        folder = folders.pop()
        with suppress(OSError):
            names, below = _listed(root, folder)
            folders += ([*folder, name] for name in reversed(below))
            yield from ([*folder, name] for name in names)


def _listed(root: bytes, folder: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of its files and of its folders."""
    descriptor = _descend(root, folder)
    try:
        with os.scandir(descriptor) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    finally:
        os.close(descriptor)
    return [name for name, is_folder in found if not is_folder], [name for name, is_folder in found if is_folder]


def _inside(part: str, name: str) -> list[str] | None:
    """The way from the part to the file; empty if the part is the file itself."""
    if part and name == part:
        return []
    if part and not name.startswith(f"{part}/"):
        return None
    return name[len(part) + 1 if part else 0 :].split("/")


def _opened(root: bytes, names: Sequence[str]) -> BinaryIO:
    if not names:
        return _regular(os.open(root, _FILE))
    *folders, last = names
    here = _descend(root, folders)
    try:
        return _regular(os.open(_entry(here, last), _FILE, dir_fd=here))
    finally:
        os.close(here)


def _descend(root: bytes, folders: Sequence[str]) -> int:
    here = os.open(root, _FOLDER)
    for name in folders:
        above = here
        try:
            here = os.open(_entry(above, name), _FOLDER, dir_fd=above)
        finally:
            os.close(above)
    return here


def _entry(folder: int, name: str) -> bytes:
    """The entry that is listed under this name. Never a way out of the folder."""
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(name)
    plain = name.encode("utf-8", "surrogateescape")
    if "\\" in name and not _exists(folder, plain):
        return next((raw for raw in map(os.fsencode, os.listdir(folder)) if shown(raw) == name), plain)
    return plain


def _exists(folder: int, name: bytes) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except OSError:
        return False
    return True


def _regular(descriptor: int) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError("not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)
