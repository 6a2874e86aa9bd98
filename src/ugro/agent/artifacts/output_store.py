"""The outputs of one attempt that were fetched from one node, and the record of what they are.

``jobs/<id>/attempt_N/output/`` has the files of the first node, ``attempt_N/nodes/<node>/`` those of the others, and
``attempt_N/.mirror/`` the journals, the records and incomplete files.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ugro.agent.artifacts.file_store import FileStore, sync_file_system
from ugro.core.results import LeftFile
from ugro.core.support.codec import DecodeError, decode
from ugro.policy.result_selection import Choice
from ugro.remote import durable
from ugro.remote.files.checkpoint_names import PART
from ugro.remote.files.listing import RunFile
from ugro.remote.files.received import Folder, is_file
from ugro.remote.globs import PathGlob

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
