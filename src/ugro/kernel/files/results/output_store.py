"""The outputs of one attempt that were fetched from one node, and the record of what they are.

``jobs/<id>/attempt_N/output/`` has the files of the first node, ``attempt_N/nodes/<node>/`` those of the others, and
``attempt_N/.mirror/`` the journals, the records and incomplete files.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tarfile
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from ugro.kernel.files.model import LeftFile, Part
from ugro.kernel.files.results.file_store import FileStore, sync_file_system
from ugro.kernel.files.rules import Choice
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import NotFound
from ugro.node import durable
from ugro.node.files.listing import PART, RunFile
from ugro.node.files.transfer import Folder, is_file
from ugro.node.globs import PathGlob

MIRROR = ".mirror"
_MOST_NAMED = 1000
_OF = "+"  # in no name of a node
_DUPLICATES = threading.Lock()
_FOLDERS = threading.Lock()  # an empty folder is not deleted while a file is put into it


@dataclass(frozen=True, slots=True)
class Arrived:
    """All files are here and on the disk."""

    files: int
    bytes: int
    left: tuple[LeftFile, ...] = ()  # still on the node
    left_count: int = 0
    unsendable: tuple[LeftFile, ...] = ()
    same: int = 0  # files that the first node has, too, and that are stored once
    is_kept: bool = True  # what is left on the node outlives its run
    left_bytes: int = 0


class _SharedFolder(Folder):
    """Outputs and checkpoints of a node are fetched on their own, and either may delete the folders it emptied."""

    @contextlib.contextmanager
    def _entered(self, folders: Sequence[bytes]) -> Iterator[int]:
        with _FOLDERS:
            os.makedirs(self.root, 0o700, exist_ok=True)
            with super()._entered(folders) as parent:
                yield parent


class OutputStore(FileStore):
    def __init__(self, attempt: Path, node: str, *, is_first: bool, part: str = "") -> None:
        """``part``: of files that are fetched on their own, with a journal and a record of their own."""
        name = f"{node}{_OF}{part}" if part else node
        super().__init__(attempt / "output" if is_first else attempt / "nodes" / node, attempt / MIRROR, name)
        self._attempt = attempt
        self._folder = _SharedFolder(str(self.root), str(self._partial))
        self._first = attempt / "output"
        self._record = self._state / f"{name}.json"
        self._work = self._state / f"{name}.work"
        self._node, self._part = node, part
        self._is_first = is_first

    def arrived(self) -> Arrived | None:
        try:
            return decode(Arrived, json.loads(self._record.read_bytes()))
        except (OSError, ValueError, DecodeError):
            return None

    def taken(self) -> set[bytes]:
        """The names of files in the same folder that came as the other part of the node's files."""
        part = "" if self._part else PART
        return set(OutputStore(self._attempt, self._node, is_first=self._is_first, part=part).fetched())

    def note_work(self, files: Sequence[RunFile], patterns: Sequence[str]) -> None:
        """Records which of its files were made in its working directory: those that a next attempt may get there."""
        known, globs = self.work(), [PathGlob(os.fsencode(pattern)) for pattern in patterns]
        names = known | {file.name for file in files if file.is_work or _matches(file.name, globs)}
        if names != known:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = {"names": [name.decode("utf-8", "surrogateescape") for name in sorted(names)]}
            durable.write_json(str(self._work), written, is_lasting=False)

    def work(self) -> set[bytes]:
        """The names of the files that were made in its working directory."""
        try:
            names = json.loads(self._work.read_bytes())["names"]
        except (OSError, ValueError, KeyError):
            return set()
        return {name.encode("utf-8", "surrogateescape") for name in names}

    def finish(self, choice: Choice, unlisted: int = 0, *, is_kept: bool) -> Arrived:
        """Everything wanted is here; when this returns, it is on the disk, too. ``unlisted`` more are left."""
        before = self.arrived()
        left = [LeftFile(shown(one.file.name), one.file.size, one.reason) for one in choice.left]
        unsendable = [LeftFile(shown(one.name), one.size, one.problem or "") for one in choice.unsendable]
        named, total = (tuple(left[:_MOST_NAMED]), len(left) + unlisted), sum(one.bytes for one in left)
        if before is not None and not before.is_kept:  # the node no longer lists those that were moved since
            named, total = (before.left, before.left_count), before.left_bytes
        self.drop_partial()
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_file_system(self._state)
        # One node at a time: the last one to finish finds the files of the others.
        with _DUPLICATES:
            same = (before.same if before is not None else 0) + self._drop_duplicates()
            arrived = Arrived(*self._size(), *named, tuple(unsendable[:_MOST_NAMED]), same, is_kept, total)
            durable.write_json(str(self._record), asdict(arrived))
        return arrived

    def sync(self) -> None:
        """When this returns, everything that arrived is on the disk."""
        sync_file_system(self._state)

    def note_left(self, kept: Sequence[RunFile], unlisted: int = 0) -> None:
        """Of what it had left, the node has just these; the others are here, or were deleted there."""
        if (before := self.arrived()) is None:
            return
        reasons = {one.name: one.reason for one in before.left}
        other = before.left[0].reason if before.left else "left on the node"
        left = [LeftFile(name, file.size, reasons.get(name, other)) for file in kept for name in [shown(file.name)]]
        named, total = tuple(left[:_MOST_NAMED]), sum(one.bytes for one in left)
        arrived = replace(before, left=named, left_count=len(left) + unlisted, left_bytes=total)
        files, size = self._size()
        durable.write_json(str(self._record), asdict(replace(arrived, files=files, bytes=size)))

    def _size(self) -> tuple[int, int]:
        """The number of files that it fetched and that are here, and of their bytes."""
        sizes = [os.lstat(self._folder.path(name)).st_size for name in self.fetched()]
        return len(sizes), sum(sizes)

    def _drop_duplicates(self) -> int:
        """Stores files that another node has in common with the first once. Returns how many of ours were deleted."""
        if not self._is_first:
            return self._drop_files_of_the_first()
        for record in self._state.glob("*.json"):
            if record != self._record:
                node, _, part = record.stem.partition(_OF)
                OutputStore(self._attempt, node, is_first=False, part=part)._drop_after_the_first()
        return 0

    def _drop_after_the_first(self) -> None:
        arrived = self.arrived()
        if arrived is not None and (same := self._drop_files_of_the_first()):
            files, size = self._size()
            arrived = replace(arrived, files=files, bytes=size, same=arrived.same + same)
            durable.write_json(str(self._record), asdict(arrived))

    def _drop_files_of_the_first(self) -> int:
        same = 0
        for name in map(os.fsdecode, self.fetched()):
            path, other = self.root / name, self._first / name
            if is_file(os.fsencode(other)) and _is_same(path, other):
                path.unlink()
                same += 1
        for folder, _, _ in os.walk(self.root, topdown=False):
            with contextlib.suppress(OSError), _FOLDERS:
                os.rmdir(folder)
        return same


def with_left(folder: Path) -> tuple[int, ...]:
    """The attempts at a job that left files on a node. Blocks."""
    found = set()
    for record in folder.glob(f"attempt_*/{MIRROR}/*.json"):
        with contextlib.suppress(OSError, ValueError, DecodeError):
            if decode(Arrived, json.loads(record.read_bytes())).left_count:
                found.add(int(record.parent.parent.name.removeprefix("attempt_")))
    return tuple(sorted(found))


def _matches(name: bytes, globs: Sequence[PathGlob[bytes]]) -> bool:
    """Whether the file, or a folder that it is in, is named by a pattern of a job's outputs, read as on the node."""
    parts = name.split(b"/")
    return any(one.fits(parts[:end]) for one in globs for end in range(len(parts), 0, -1))


def shown(name: bytes) -> str:
    """A name as text that can be written anywhere."""
    return name.decode("utf-8", "backslashreplace")


def _is_same(path: Path, other: Path) -> bool:
    if path.lstat().st_size != other.lstat().st_size:
        return False
    with path.open("rb") as one, other.open("rb") as two:
        while (piece := one.read(1 << 20)) == two.read(1 << 20):
            if not piece:
                return True
    return False


# --- opening collected files ------------------------------------------------------------------------------------------
# Opens the collected files of a job. They were written on nodes: no link is followed, and no name leads elsewhere.
#
# A name is the one that ``JobResults`` lists, where bytes that are not UTF-8 are written as ``\xff``.


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
