"""What a job can resume from, and what each attempt began from: complete, or not there.

``jobs/<id>/.checkpoints/`` has a folder for each checkpoint, numbered in the order of arrival: the highest is the
newest. In it are ``content`` (the content of a folder, or the one file) and ``record.json``. What is called
``.arriving.<fingerprint>`` is incomplete; the next transfer of the same checkpoint continues it. ``attempt_N.json``
says what attempt N began from: it is written once, so that all nodes of the attempt get the same checkpoint even if a
newer one arrives while they start. Files that are results are apart from these (``output_store``).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ugro.agent.artifacts.file_store import FileStore, expect_room, sync_file_system
from ugro.core.errors import NotFound
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.files import Found
from ugro.remote import durable
from ugro.remote.files import listing, received
from ugro.remote.files.listing import RunFile, Unsendable

_ARRIVING = ".arriving."
_REMOVING = ".removing."
_FILES = "files"  # the name of its journal


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was fetched."""

    serial: int
    found: Found
    node: str  # where it was written
    attempt: int  # in which it was fetched
    kept: str  # its fingerprint here: some file systems store times less exactly than others
    path: str  # of its content

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def number(self) -> int | None:
        return self.found.number

    @property
    def bytes(self) -> int:
        return self.found.bytes

    @property
    def file(self) -> str | None:
        """The path of one that is a file."""
        return f"{self.path}/{self.name}" if self.found.kind == "file" else None


def files_of(checkpoint: Checkpoint, folder: str) -> dict[bytes, Path]:
    """Its files here by their names among the results, in the folder of the checkpoints. Blocks."""
    root = Path(checkpoint.path)
    prefix = folder if checkpoint.file is not None else f"{folder}/{checkpoint.name}"
    found = ((os.path.relpath(path, root), path) for path in root.rglob("*") if path.is_file())
    return {os.fsencode(f"{prefix}/{name}"): path for name, path in found}


@dataclass(frozen=True, slots=True)
class _Begun:
    serial: int | None  # None: it began from scratch


class CheckpointStore:
    """Of one job. Not async: call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Checkpoint | None:
        for serial in sorted(self._serials(), reverse=True):
            if (found := self._read(serial)) is not None:
                return found
        return None

    def arriving(self, found: Found) -> FileStore:
        """For the files of one that is fetched, with those already here. Other incomplete ones are deleted."""
        folder = self._arriving(found)
        self._remove_all(_ARRIVING, _REMOVING, but=folder.name)
        (folder / "content").mkdir(mode=0o700, parents=True, exist_ok=True)
        expect_room(self._folder, found.bytes - _size(folder))
        return FileStore(folder / "content", folder, _FILES)

    def settle(self, files: Sequence[RunFile], found: Found, node: str, attempt: int) -> Checkpoint:
        """All files are here: from now on it is the newest. Only then older ones are deleted."""
        folder = self._arriving(found)
        received.expect_same(str(folder / "content"), files)
        sync_file_system(folder)
        serial = max(self._serials(), default=0) + 1
        place = self._folder / str(serial)
        settled = Checkpoint(serial, found, node, attempt, _fingerprint(folder / "content"), str(place / "content"))
        FileStore(folder / "content", folder, _FILES).drop_state()
        durable.write_json(str(folder / "record.json"), asdict(settled))
        folder.rename(place)
        durable.sync_folder(str(self._folder))
        self._prune()
        return settled

    def drop_incomplete(self) -> None:
        self._remove_all(_ARRIVING)

    def adopt(self, earlier: CheckpointStore, attempt: int) -> Checkpoint | None:
        """Takes over the newest of another job, for an attempt that has not begun, unless there is one here."""
        theirs = earlier.newest() if self._begun(attempt) is None and self.newest() is None else None
        if theirs is None:
            return None
        self._remove_all(_ARRIVING)
        fresh, place = self._folder / f"{_ARRIVING}adopted", self._folder / "1"
        fresh.mkdir(mode=0o700, parents=True)
        shutil.copytree(theirs.path, fresh / "content", copy_function=os.link)
        found = replace(theirs.found, attempt=0, serial=0)  # what this job writes is newer
        kept = _fingerprint(fresh / "content")
        own = Checkpoint(1, found, theirs.node, 0, kept, str(place / "content"))
        durable.write_json(str(fresh / "record.json"), asdict(own))
        fresh.rename(place)
        durable.sync_folder(str(self._folder))
        return own

    def begin(self, attempt: int) -> Checkpoint | None:
        """What the attempt resumes from; None if it begins from scratch. Decided by the first call."""
        begun = self._begun(attempt)
        if begun is None:
            newest = self.newest()
            begun = _Begun(newest.serial if newest else None)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            durable.write_json(str(self._attempt_file(attempt)), asdict(begun))
            self._prune()
        if begun.serial is None:
            return None
        if (checkpoint := self._read(begun.serial)) is None:
            place = self._folder / str(begun.serial)
            raise NotFound(f"what attempt {attempt} resumes from was changed or deleted", hint=f"it was in {place}")
        return checkpoint

    def has_progressed(self, attempt: int) -> bool:
        """Whether one arrived that is newer than what the attempt began from."""
        begun, newest = self._begun(attempt), self.newest()
        return newest is not None and begun is not None and newest.serial > (begun.serial or 0)

    # --- files -------------------------------------------------------------------------------------------------

    def _arriving(self, found: Found) -> Path:
        return self._folder / (_ARRIVING + found.fingerprint)

    def _serials(self) -> list[int]:
        return [int(name) for name in self._names() if name.isascii() and name.isdigit()]

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except FileNotFoundError:
            return []

    def _read(self, serial: int) -> Checkpoint | None:
        """None when it is not what was fetched."""
        content = self._folder / str(serial) / "content"
        try:
            found = decode(Checkpoint, durable.read_json(str(content.parent / "record.json")))
            return found if _fingerprint(content) == found.kept else None
        except (DecodeError, OSError, Unsendable):
            return None

    def _attempt_file(self, attempt: int) -> Path:
        return self._folder / f"attempt_{attempt}.json"

    def _begun(self, attempt: int) -> _Begun | None:
        try:
            return decode(_Begun, json.loads(self._attempt_file(attempt).read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def _prune(self) -> None:
        """Keeps the newest, and what the latest attempt began from: some of its nodes may still need it."""
        attempts = [int(name[8:-5]) for name in self._names() if name.startswith("attempt_") and name[8:-5].isdigit()]
        begun = self._begun(max(attempts)) if attempts else None
        newest = self.newest()
        keep = {newest.serial if newest else None, begun.serial if begun else None}
        for serial in set(self._serials()) - keep:
            (self._folder / str(serial)).rename(self._folder / (_REMOVING + secrets.token_hex(4)))
        for attempt in attempts:
            if attempt < max(attempts):
                self._attempt_file(attempt).unlink(missing_ok=True)
        self._remove_all(_REMOVING)

    def _remove_all(self, *marks: str, but: str = "") -> None:
        for name in self._names():
            if name.startswith(marks) and name != but:
                shutil.rmtree(self._folder / name, ignore_errors=True)


def _fingerprint(content: Path) -> str:
    return listing.fingerprint(listing.files_of(str(content)))


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
