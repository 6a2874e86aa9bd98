"""What came home of a job's checkpoints, and what each attempt began from: files only, whole or not there.

``<home>/jobs/<id>/checkpoints/`` holds a folder for each that came, numbered as they came: the highest is the newest.
In it are ``content`` (a folder's content, or the one file) and ``record.json``. What has another name is on its way,
or left by an agent that was killed. ``attempt_N.json`` says what attempt N began from: written once, so that every
node of it gets the same one, also when a newer one comes home while they start.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from ugro.core.errors import NotFound, UgroError
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.checkpoints import Found
from ugro.remote import durable
from ugro.remote.files import archive

_ARRIVING = ".arriving."
_REMOVING = ".removing."
# Left free on our disk: the database of all jobs is on it, too.
_SPARE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is home."""

    serial: int
    found: Found
    node: str  # where it was written
    attempt: int  # in which it came home
    kept: str  # its fingerprint as it is here: some file systems know times less exactly than others
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


@dataclass(frozen=True, slots=True)
class _Begun:
    serial: int | None  # None: it began anew


class CheckpointHome:
    """Of one job. Not async: whoever is asks from a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Checkpoint | None:
        for serial in sorted(self._serials(), reverse=True):
            if (found := self._read(serial)) is not None:
                return found
        return None

    def arriving(self, found: Found) -> Path:
        """A new and empty folder for one that is to come; what another transfer left is deleted."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_all(_ARRIVING, _REMOVING)
        free = shutil.disk_usage(self._folder).free
        if found.bytes + _SPARE_BYTES > free:
            raise UgroError(
                f"checkpoint {found.name} of {found.bytes >> 20} MB does not fit: {free >> 20} MB are free",
                hint=f"make room on the disk of {self._folder}",
            )
        folder = self._folder / (_ARRIVING + secrets.token_hex(4)) / "content"
        folder.mkdir(mode=0o700, parents=True)
        return folder

    def settle(self, content: Path, found: Found, node: str, attempt: int) -> Checkpoint:
        """It is whole and on the disk: from now on it is the newest. Only then an older one goes."""
        serial = max(self._serials(), default=0) + 1
        place = self._folder / str(serial)
        kept, _ = archive.fingerprint(str(content))
        settled = Checkpoint(serial, found, node, attempt, kept, str(place / "content"))
        durable.write_json(str(content.parent / "record.json"), asdict(settled))
        content.parent.rename(place)
        durable.sync_folder(str(self._folder))
        self._prune()
        return settled

    def begin(self, attempt: int) -> Checkpoint | None:
        """What the attempt resumes from; None when it begins anew. Decided when it is first asked."""
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
        """Whether one came home that is newer than what the attempt began from."""
        begun, newest = self._begun(attempt), self.newest()
        return newest is not None and begun is not None and newest.serial > (begun.serial or 0)

    def discard(self, arriving: Path) -> None:
        shutil.rmtree(arriving.parent, ignore_errors=True)

    # --- files -------------------------------------------------------------------------------------------------

    def _serials(self) -> list[int]:
        return [int(name) for name in self._names() if name.isascii() and name.isdigit()]

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except FileNotFoundError:
            return []

    def _read(self, serial: int) -> Checkpoint | None:
        """None when it is not what came."""
        content = self._folder / str(serial) / "content"
        try:
            found = decode(Checkpoint, durable.read_json(str(content.parent / "record.json")))
            is_same = archive.fingerprint(str(content))[0] == found.kept
        except (DecodeError, OSError, archive.ParcelError):
            return None
        return found if is_same else None

    def _attempt_file(self, attempt: int) -> Path:
        return self._folder / f"attempt_{attempt}.json"

    def _begun(self, attempt: int) -> _Begun | None:
        try:
            return decode(_Begun, json.loads(self._attempt_file(attempt).read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def _prune(self) -> None:
        """All but the newest, and what the latest attempt began from: some of its nodes may still need it."""
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

    def _remove_all(self, *marks: str) -> None:
        for name in self._names():
            if name.startswith(marks):
                shutil.rmtree(self._folder / name, ignore_errors=True)
