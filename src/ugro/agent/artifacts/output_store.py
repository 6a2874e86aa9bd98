"""What came home of one attempt on one node: files only, and a journal of what they were like on the node.

``jobs/<id>/attempt_N/output/`` has the files of the first node, ``attempt_N/nodes/<node>/`` those of the others, and
``attempt_N/.mirror/`` the journals and what is on its way. A file that grew is added to in place; one that is new or
was written anew comes beside it and takes its place when it is whole. Nothing here follows a link: a name from a node
stays below its folder, whatever it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ugro.core.errors import UgroError
from ugro.core.results import LeftFile
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.outputs import Sink, Wanted
from ugro.policy.result_selection import Choice, OutputFile
from ugro.remote import durable
from ugro.remote.files import resumable
from ugro.remote.files.resumable import Head

MIRROR = ".mirror"
# Left free on our disk: the database of all jobs is on it, too.
SPARE_BYTES = 256 << 20
_CHECK_EVERY_BYTES = 64 << 20
_MOST_TOLD = 1000
_UNSETTLED = -1
_DOUBLES = threading.Lock()
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class HomeFull(UgroError):
    """It waits on the node until there is room here."""


class Entry(NamedTuple):
    """A file as it was on the node when it came."""

    size: int
    changed_ns: int
    inode: int
    is_pieced: bool  # put together of parts that were compared by their ends only


@dataclass(frozen=True, slots=True)
class Arrived:
    """All of it is here, and lasts."""

    files: int
    bytes: int
    left: tuple[LeftFile, ...] = ()  # still on the node
    left_count: int = 0
    unsendable: tuple[LeftFile, ...] = ()
    same: int = 0  # files that are the first node's, too, and are here once
    is_kept: bool = True  # what is left is where it outlives its run


class RunHome:
    """Not async: whoever is asks from a thread, one at a time."""

    def __init__(self, attempt: Path, node: str, *, is_first: bool) -> None:
        self.root = attempt / "output" if is_first else attempt / "nodes" / node
        self.first = attempt / "output"
        self.problems: dict[bytes, str] = {}  # what could not be read on the node
        self._mirror = attempt / MIRROR
        self._journal = self._mirror / f"{node}.journal"
        self._record = self._mirror / f"{node}.json"
        self._partial = self._mirror / f"{node}.partial"
        self._is_first = is_first
        self._spoilt: set[bytes] = set()
        self._read: dict[bytes, Entry] | None = None

    @property
    def _entries(self) -> dict[bytes, Entry]:
        if self._read is None:
            self._read = _read_journal(self._journal)
        return self._read

    # --- what is here ------------------------------------------------------------------------------------------

    def arrived(self) -> Arrived | None:
        try:
            return decode(Arrived, json.loads(self._record.read_bytes()))
        except (OSError, ValueError, DecodeError):
            return None

    def wanted(self, file: OutputFile) -> Wanted | None:
        """What is to come of it; None when all of it is here."""
        entry = self._entries.get(file.name)
        if entry is not None and entry[:3] == (file.size, file.changed_ns, file.inode) and self._has(file):
            return None
        base = None if file.name in self._spoilt else self._base(file.name)
        if base is None:
            return Wanted(file)
        fd = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            return Wanted(file, size, resumable.check_of(fd, size)) if 0 < size <= file.size else Wanted(file)
        finally:
            os.close(fd)

    def pieced(self) -> list[bytes]:
        return [name for name, entry in self._entries.items() if entry.is_pieced]

    def compare(self, name: bytes, content_hash: str | None) -> None:
        """What was put together is right, or comes once more; what is gone from the node is what we have."""
        entry = self._entries[name]
        if content_hash is None or self._content_hash(name) == content_hash:
            self._note(name, entry._replace(is_pieced=False))
        else:
            self._spoilt.add(name)
            self._note(name, entry._replace(changed_ns=_UNSETTLED, is_pieced=False))

    def _has(self, file: OutputFile) -> bool:
        with contextlib.suppress(OSError):
            about = os.lstat(self._target(file.name))
            return stat.S_ISREG(about.st_mode) and about.st_size == file.size
        return False

    def _base(self, name: bytes) -> bytes | None:
        """What is here of it: on its way, or in its place."""
        for path in (self._arriving(name), self._target(name)):
            if _is_file(path):
                return path
        return None

    def _content_hash(self, name: bytes) -> str | None:
        with contextlib.suppress(OSError):
            fd = os.open(self._target(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return resumable.content_hash(fd)
            finally:
                os.close(fd)
        return None

    # --- what comes --------------------------------------------------------------------------------------------

    def sink(self, wanted: Sequence[Wanted], *, is_final: bool) -> Sink:
        """``is_final``: nobody writes there any more."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        arriving = _Arriving(self, wanted, is_final)
        return Sink(arriving.begin, arriving.write, arriving.end, arriving.close)

    def finish(self, choice: Choice, *, is_kept: bool) -> Arrived:
        """All that is wanted is here. It lasts when this returns."""
        before = self.arrived()
        left = [LeftFile(shown(one.file.name), one.file.size, one.reason) for one in choice.left]
        unsendable = [LeftFile(shown(one.name), one.size, one.problem or "") for one in choice.unsendable]
        told = (tuple(left[:_MOST_TOLD]), len(left))
        if before is not None and not before.is_kept:  # those that were put aside since are told no more
            told = (before.left, before.left_count)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._mirror.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sync_file_system(self._mirror)
        # Whichever node's files are here last finds the other's: one at a time.
        with _DOUBLES:
            same = (before.same if before is not None else 0) + self._drop_doubles()
            arrived = Arrived(*self._size(), *told, tuple(unsendable[:_MOST_TOLD]), same, is_kept)
            durable.write_json(str(self._record), asdict(arrived))
        return arrived

    def only_here(self, listed: Sequence[OutputFile]) -> list[OutputFile]:
        """What came and is no longer there."""
        names = {file.name for file in listed}
        return [
            OutputFile(name, entry.size, entry.changed_ns, entry.inode)
            for name, entry in self._entries.items()
            if name not in names and _is_file(self._target(name))
        ]

    def drop(self, name: bytes) -> None:
        """It came, and by the job's own rule something newer has its place now."""
        with contextlib.suppress(OSError):
            os.unlink(self._target(name))

    def place(self, name: bytes) -> None:
        """What has arrived takes its place, whatever was there."""
        *folders, last = name.split(b"/")
        fds = [os.open(self.root, _FOLDER)]
        try:
            for folder in folders:
                fds.append(_entered(folder, fds[-1]))
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(last, dir_fd=fds[-1]).st_mode):
                    shutil.rmtree(self._target(name))
            os.rename(self._arriving(name), last, dst_dir_fd=fds[-1])
        finally:
            for fd in fds:
                os.close(fd)

    def note(self, name: bytes, entry: Entry) -> None:
        self._spoilt.discard(name)
        self.problems.pop(name, None)
        self._note(name, entry)

    def open_base(self, name: bytes, *, is_new: bool) -> tuple[int, bool]:
        """To write to; and whether it still has to take its place."""
        base = None if is_new else self._base(name)
        if base is not None and base != self._arriving(name):
            return os.open(base, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), False
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._arriving(name), flags | (os.O_TRUNC if is_new else 0), 0o600), True

    def _note(self, name: bytes, entry: Entry) -> None:
        self._entries[name] = entry
        self._mirror.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._journal.open("a", encoding="ascii") as journal:
            journal.write(json.dumps([name.decode("utf-8", "surrogateescape"), *entry]) + "\n")

    def _size(self) -> tuple[int, int]:
        """How many files, and how many bytes in them."""
        sizes = [path.lstat().st_size for path in _files_below(self.root)]
        return len(sizes), sum(sizes)

    def _drop_doubles(self) -> int:
        """What other nodes and the first have alike is kept once, as the first's. Returns how many of our own went."""
        if not self._is_first:
            return self._drop_what_the_first_has()
        for record in self._mirror.glob("*.json"):
            if record != self._record:
                RunHome(self.first.parent, record.stem, is_first=False)._drop_what_came_before_the_first()
        return 0

    def _drop_what_came_before_the_first(self) -> None:
        arrived = self.arrived()
        if arrived is not None and (same := self._drop_what_the_first_has()):
            files, size = self._size()
            arrived = replace(arrived, files=files, bytes=size, same=arrived.same + same)
            durable.write_json(str(self._record), asdict(arrived))

    def _drop_what_the_first_has(self) -> int:
        same = 0
        for path in list(_files_below(self.root)):
            other = self.first / path.relative_to(self.root)
            if _is_file(os.fsencode(other)) and _is_same(path, other):
                path.unlink()
                same += 1
        for folder, _, _ in os.walk(self.root, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return same

    def _target(self, name: bytes) -> bytes:
        return os.path.join(os.fsencode(self.root), name)

    def _arriving(self, name: bytes) -> bytes:
        return os.path.join(os.fsencode(self._partial), hashlib.sha256(name).hexdigest()[:32].encode())


class _Arriving:
    """Writes files as they come, one after the other."""

    def __init__(self, home: RunHome, wanted: Sequence[Wanted], is_final: bool) -> None:
        self._home = home
        self._wanted = wanted
        self._is_final = is_final
        self._head: Head | None = None
        self._fd = -1
        self._is_to_be_placed = False
        self._offset = 0
        self._unchecked = 0

    def begin(self, head: Head) -> None:
        name = self._wanted[head.number].file.name
        if head.problem is not None:
            self._home.problems[name] = head.problem
            return
        self._expect_room(head.length)
        self._head, self._offset = head, head.offset
        self._fd, self._is_to_be_placed = self._home.open_base(name, is_new=head.offset == 0)

    def write(self, piece: bytes) -> None:
        self._unchecked += len(piece)
        if self._unchecked > _CHECK_EVERY_BYTES:
            self._unchecked = 0
            self._expect_room(len(piece))
        done = 0
        while done < len(piece):
            done += os.pwrite(self._fd, piece[done:], self._offset + done)
        self._offset += len(piece)

    def end(self, state: int) -> None:
        assert self._head is not None
        head, self._head = self._head, None
        name = self._wanted[head.number].file.name
        if state == resumable.BROKEN:
            os.ftruncate(self._fd, head.offset)
        else:
            os.ftruncate(self._fd, head.size)
            os.fchmod(self._fd, head.mode | 0o600)
            with contextlib.suppress(OverflowError, OSError):
                os.utime(self._fd, ns=(head.changed_ns, head.changed_ns))
            if self._is_to_be_placed:
                self._home.place(name)
            is_settled = self._is_final or state == resumable.WHOLE
            is_pieced = head.offset > 0 and not resumable.is_all_checked(head.offset)
            changed_ns = head.changed_ns if is_settled else _UNSETTLED
            self._home.note(name, Entry(head.size, changed_ns, head.inode, is_pieced))
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _expect_room(self, length: int) -> None:
        free = shutil.disk_usage(self._home.root).free
        if length + SPARE_BYTES > free:
            raise HomeFull(
                f"results wait on the node: {length >> 20} MB do not fit here, where {free >> 20} MB are free",
                hint=f"make room on the disk of {self._home.root}",
            )


def shown(name: bytes) -> str:
    """A name as text that can be written anywhere."""
    return name.decode("utf-8", "backslashreplace")


def _read_journal(path: Path) -> dict[bytes, Entry]:
    entries: dict[bytes, Entry] = {}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as journal:
        for line in journal:
            with contextlib.suppress(ValueError, TypeError):  # the last one may have been cut by a crash
                name, size, changed_ns, inode, is_pieced = json.loads(line)
                entry = Entry(int(size), int(changed_ns), int(inode), bool(is_pieced))
                entries[name.encode("utf-8", "surrogateescape")] = entry
    return entries


def _entered(name: bytes, parent: int) -> int:
    """A folder, made where there is none; what was a file when it came is one no longer on the node."""
    for _ in range(2):
        try:
            return os.open(name, _FOLDER, dir_fd=parent)
        except FileNotFoundError:
            os.mkdir(name, 0o700, dir_fd=parent)
        except OSError:
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, _FOLDER, dir_fd=parent)


def _files_below(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in names:
            yield Path(folder, name)


def _is_file(path: bytes) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def _is_same(path: Path, other: Path) -> bool:
    if path.lstat().st_size != other.lstat().st_size:
        return False
    with path.open("rb") as one, other.open("rb") as two:
        while (piece := one.read(1 << 20)) == two.read(1 << 20):
            if not piece:
                return True
    return False


def _sync_file_system(path: Path) -> None:
    """One call instead of one for each file: there may be ten thousand small ones."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(fd)
