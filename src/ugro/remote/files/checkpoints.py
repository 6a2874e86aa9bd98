"""The checkpoints of a job on this node: which they are, where they are, and the one that an attempt resumes from.

The contract with a job's program, whatever it is written with:

- It writes its checkpoints into one folder of its working directory, which ``UGRO_CHECKPOINT_DIR`` names. What is in
  it outlives an attempt: the next attempt on this node finds it there again.
- A checkpoint is one entry of that folder: a file, or a folder with everything in it. It is complete when its name
  neither begins with a dot nor ends in .tmp or .partial: write it under such a name, then rename it.
- The newest is the one with the highest number at the end of its name, before suffixes such as .pt (``step_000200``,
  ``epoch-3.pt``); a number with a decimal point, or of more than 18 digits, does not count. Names without a number
  come after those with one. Among equals, the attempt that wrote them decides, and then the order in which they were
  written (``checkpoint_order``). Symbolic links are ignored.
- ``UGRO_RESUME_DIR`` is a folder with exactly the checkpoint to resume from: the content of one that is a folder, or
  the one file. The program must not write to it. If it is not set, there is nothing to resume from. The same
  checkpoint is in the folder of the checkpoints, under its name.

``checkpoint_dir`` says where the folder is. One that the user chose is never deleted, and what it contained before the
job was submitted is not the job's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from typing import Any, Callable, Dict, Iterator, Optional

from ugro.remote import disk, durable
from ugro.remote.files import listing, received
from ugro.remote.files.aside import ARRIVING, REMOVING, beside, link_all, remove_all
from ugro.remote.files.checkpoint_dir import CheckpointDir
from ugro.remote.files.checkpoint_names import is_complete
from ugro.remote.files.listing import RunFile, Unsendable
from ugro.remote.files.resumable import CHUNK, StreamError
from ugro.remote.files.tail import open_below
from ugro.remote.program import Refused


class Checkpoint:
    """The files of one checkpoint, to be sent."""

    def __init__(self, folder: CheckpointDir, name: str) -> None:
        self._folder = folder.place_of(name)
        self._name = name

    def has_any(self) -> bool:
        return True

    def files(self) -> Iterator[RunFile]:
        try:
            return iter(listing.files_of(os.path.join(self._folder, self._name)))
        except (Unsendable, FileNotFoundError) as error:
            raise Refused("changed", "checkpoint %s: %s" % (self._name, error)) from error

    def open(self, name: bytes) -> Optional[int]:
        """None when it is no longer there."""
        is_folder = os.path.isdir(os.path.join(self._folder, self._name))
        return open_below(self._folder, [self._name, *listing.parts_of(name)] if is_folder else [self._name])


# --- what is resumed from ---------------------------------------------------------------------------------------


class Resume:
    """The checkpoint that an attempt resumes from: a folder named after its fingerprint, complete or not there."""

    def __init__(self, folder: CheckpointDir, name: str, kind: str, fingerprint: str) -> None:
        self._dir = folder
        self._kind = kind
        self._folder = folder.resume
        self._written = os.path.join(folder.place_of(name), name)
        self._name = name
        self._fingerprint = fingerprint
        self._path = os.path.join(folder.resume, fingerprint)

    def find(self) -> Optional[str]:
        if self._is_same(self._path) or (self._is_same(self._written) and self._link()):
            self._dir.note_resumed(self._name, self._kind, self._fingerprint)
            return self._path
        # A user's folder on another file system is resumed from where it is instead of being sent again. Ours moves.
        stays = not self._dir.is_ours and os.path.isdir(self._written)
        return self._written if stays and self._is_same(self._written) else None

    def _link(self) -> bool:
        """Hard links to the written files: the program may delete its own at any time."""
        with self._arriving() as folder:
            root = os.path.join(folder, "content")
            try:
                link_all(self._written, root)
            except OSError:
                return False
            self._settle(root)
        return self._is_same(self._path)

    def receive(self, size: int, out: int, took: Callable[[int], None]) -> str:
        with self._arriving() as folder:
            _expect_room(folder, size)
            try:
                root = received.receive_whole(folder, size, _read(out, took))
            except StreamError as error:
                raise Refused("damaged", "checkpoint %s: %s" % (self._name, error)) from error
            self._settle(root)
        self._dir.note_resumed(self._name, self._kind, self._fingerprint)
        return self._path

    @contextlib.contextmanager
    def _arriving(self) -> Iterator[str]:
        """A locked folder for one transfer. Those whose process is gone, and with it the lock, are deleted."""
        durable.make_folder(self._folder)
        remove_all(self._folder, ARRIVING, REMOVING)
        folder = os.path.join(self._folder, ARRIVING + os.urandom(8).hex())
        os.mkdir(folder, 0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield folder
        finally:
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)

    def _settle(self, root: str) -> None:
        """Puts it in its place in one step; then deletes what earlier attempts resumed from."""
        if os.path.lexists(self._path) and not self._is_same(self._path):
            os.rename(self._path, beside(self._path, REMOVING))
        if not os.path.lexists(self._path):
            os.rename(root, self._path)
            durable.sync_folder(self._folder)
        for name in os.listdir(self._folder):
            if name != self._fingerprint and not name.startswith("."):
                old = os.path.join(self._folder, name)
                os.rename(old, beside(old, REMOVING))
        remove_all(self._folder, REMOVING)

    def _is_same(self, path: str) -> bool:
        try:
            return listing.fingerprint(listing.files_of(path)) == self._fingerprint
        except (OSError, Unsendable):
            return False


def _read(out: int, took: Callable[[int], None]) -> Iterator[bytes]:
    for piece in iter(lambda: os.read(out, CHUNK), b""):
        yield piece
        took(len(piece))


def _expect_room(folder: str, size: int) -> None:
    if (text := disk.shortage(folder, size, "a checkpoint")) is not None:
        raise Refused(disk.NO_SPACE, text)


def name_in(params: Dict[str, Any]) -> str:
    name = params.get("checkpoint")
    if not isinstance(name, str) or not is_complete(name):
        raise ValueError("not the name of a checkpoint: %.80r" % name)
    return name


def fingerprint_in(params: Dict[str, Any]) -> str:
    value = params.get("fingerprint")
    if not re.fullmatch(r"[0-9a-f]{32}", str(value)):
        raise ValueError("not a fingerprint: %.80r" % value)
    return str(value)
