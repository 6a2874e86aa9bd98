"""The checkpoints of a job on this node: which they are, where they are, and the one that an attempt resumes from.

The contract with a job's program, whatever it is written with:

- It writes its checkpoints into the folder ``UGRO_CHECKPOINT_DIR``, which belongs to the job and outlives its attempts.
- A checkpoint is one entry of that folder: a file, or a folder with everything in it. It is complete when its name
  neither begins with a dot nor ends in .tmp or .partial: write it under such a name, then rename it.
- The newest is the one with the highest number at the end of its name, before suffixes such as .pt (``step_000200``,
  ``epoch-3.pt``); a number with a decimal point, or of more than 18 digits, does not count. Names without a number
  come after those with one, by the time of their last change. Symbolic links are ignored.
- ``UGRO_RESUME_DIR`` is a folder with exactly the checkpoint to resume from: the content of one that is a folder, or
  the one file. The program must not write to it. If it is not set, there is nothing to resume from.

A folder that the user chose is never deleted, and what it contained before the job was submitted is not the job's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from ugro.remote import disk, durable
from ugro.remote.files import listing, received
from ugro.remote.files.checkpoint_names import is_complete, number
from ugro.remote.files.listing import RunFile, Unsendable
from ugro.remote.files.resumable import CHUNK, StreamError
from ugro.remote.files.tail import open_below
from ugro.remote.program import Refused
from ugro.remote.state.rundir import AgentDir

_MOST_LOOKED_AT = 20
_ARRIVING = ".arriving."
_REMOVING = ".removing."

Answer = Dict[str, Any]


# --- which they are ---------------------------------------------------------------------------------------------


class Found:
    """A complete checkpoint by its name, kind and time of change."""

    def __init__(self, name: str, kind: str, changed_ns: int) -> None:
        self.name = name
        self.kind = kind
        self.changed_ns = changed_ns
        self.number = number(name)

    @property
    def order(self) -> Tuple[int, int, str]:
        """The newest has the highest."""
        return (-1 if self.number is None else self.number, self.changed_ns, self.name)


def complete_in(folder: str, since_ns: int) -> List[Found]:
    """Newest first."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if is_complete(entry.name):
                with contextlib.suppress(FileNotFoundError):  # programs delete their old ones at any time
                    status = entry.stat(follow_symlinks=False)
                    kind = _kind(status.st_mode)
                    if kind and status.st_mtime_ns >= since_ns:
                        found.append(Found(entry.name, kind, status.st_mtime_ns))
    return sorted(found, key=lambda one: one.order, reverse=True)


def _kind(mode: int) -> Optional[str]:
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else None


# --- where they are ---------------------------------------------------------------------------------------------


class CheckpointDir:
    """The folders of a job on this node: where it writes checkpoints, and where those it resumes from are."""

    def __init__(self, agent: AgentDir, params: Dict[str, Any]) -> None:
        self.agent = agent
        self.job = agent.run(str(params["job"]), 1).job
        self._default = os.path.join(agent.path, "checkpoints", self.job)
        self.resume = os.path.join(agent.path, "resume", self.job)
        self.path, self.is_ours = self._choose(params.get("dir"), params.get("cwd"))
        self._since_ns = 0 if self.is_ours else int(float(params.get("since") or 0) * 1e9)

    def _choose(self, chosen: Optional[str], cwd: Optional[str]) -> Tuple[str, bool]:
        if not chosen:
            return self._default, True
        path = os.path.expanduser(str(chosen))
        if "\0" in path or ".." in path.split("/"):
            raise ValueError("not a folder for checkpoints: %.200r" % path)
        if os.path.isabs(path):
            return path, False
        if not cwd:
            return os.path.join(self._default, path), True
        base = os.path.expanduser(str(cwd))
        if not os.path.isabs(base):
            raise ValueError("cwd must be absolute or begin with ~: %.200r" % base)
        return os.path.join(base, path), False

    def make(self) -> str:
        if self.is_ours:
            durable.make_folder(self.path)
            return self.path
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise Refused("checkpoint-dir", "checkpoint.dir cannot be created: %s" % error) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise Refused("checkpoint-dir", "checkpoint.dir is not writable: %s" % self.path)
        return self.path

    def has_any(self) -> bool:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            return any(True for _ in found)
        return False

    def newest(self) -> List[Answer]:
        """The newest that can be sent, preceded by newer ones that cannot, with the reason."""
        described: List[Answer] = []
        for found in complete_in(self.path, self._since_ns)[:_MOST_LOOKED_AT]:
            with contextlib.suppress(FileNotFoundError):
                described.append(self._describe(found))
                if described[-1]["problem"] is None:
                    break
        return described

    def _describe(self, found: Found) -> Answer:
        described = {"name": found.name, "kind": found.kind, "number": found.number, "changed_ns": found.changed_ns}
        try:
            files = listing.files_of(os.path.join(self.path, found.name))
        except Unsendable as error:
            return {**described, "bytes": 0, "fingerprint": "", "problem": str(error)}
        size = sum(file.size for file in files)
        return {**described, "bytes": size, "fingerprint": listing.fingerprint(files), "problem": None}

    def drop(self) -> Answer:
        """Deletes the folders that are ours. A supervisor may outlive the exit record for a moment; ranks do not."""
        if any(run.job == self.job and run.exit() is None and run.is_alive() for run in self.agent.runs()):
            raise Refused("busy", "job %s is running here: its checkpoints stay" % self.job)
        for folder in (self._default, self.resume):
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, _beside(folder, _REMOVING))
            _remove_all(os.path.dirname(folder), _REMOVING)
        return {}


class Checkpoint:
    """The files of one checkpoint, to be sent."""

    def __init__(self, folder: CheckpointDir, name: str) -> None:
        self._folder = folder.path
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

    def __init__(self, folder: CheckpointDir, name: str, fingerprint: str) -> None:
        self._folder = folder.resume
        self._written = os.path.join(folder.path, name)
        self._name = name
        self._fingerprint = fingerprint
        self._path = os.path.join(folder.resume, fingerprint)

    def find(self) -> Optional[str]:
        if self._is_same(self._path) or (self._is_same(self._written) and self._link()):
            return self._path
        # A folder on another file system is resumed from where it is instead of being sent again.
        return self._written if os.path.isdir(self._written) and self._is_same(self._written) else None

    def _link(self) -> bool:
        """Hard links to the written files: the program may delete its own at any time."""
        with self._arriving() as folder:
            root = os.path.join(folder, "content")
            try:
                _link_all(self._written, root)
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
        return self._path

    @contextlib.contextmanager
    def _arriving(self) -> Iterator[str]:
        """A locked folder for one transfer. Those whose process is gone, and with it the lock, are deleted."""
        durable.make_folder(self._folder)
        _remove_all(self._folder, _ARRIVING, _REMOVING)
        folder = os.path.join(self._folder, _ARRIVING + os.urandom(8).hex())
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
            os.rename(self._path, _beside(self._path, _REMOVING))
        if not os.path.lexists(self._path):
            os.rename(root, self._path)
            durable.sync_folder(self._folder)
        for name in os.listdir(self._folder):
            if name != self._fingerprint and not name.startswith("."):
                old = os.path.join(self._folder, name)
                os.rename(old, _beside(old, _REMOVING))
        _remove_all(self._folder, _REMOVING)

    def _is_same(self, path: str) -> bool:
        try:
            return listing.fingerprint(listing.files_of(path)) == self._fingerprint
        except (OSError, Unsendable):
            return False


def _link_all(path: str, root: str) -> None:
    os.mkdir(root, 0o700)
    base = path if os.path.isdir(path) else os.path.dirname(path)
    for file in listing.files_of(path):
        target = os.path.join(os.fsencode(root), file.name)
        if file.is_folder:
            os.mkdir(target, 0o700)
        else:
            os.link(os.path.join(os.fsencode(base), file.name), target, follow_symlinks=False)


def _read(out: int, took: Callable[[int], None]) -> Iterator[bytes]:
    for piece in iter(lambda: os.read(out, CHUNK), b""):
        yield piece
        took(len(piece))


def _expect_room(folder: str, size: int) -> None:
    if (text := disk.shortage(folder, size, "a checkpoint")) is not None:
        raise Refused(disk.NO_SPACE, text)


def _beside(path: str, mark: str) -> str:
    return os.path.join(os.path.dirname(path), mark + os.urandom(8).hex())


def _remove_all(folder: str, *marks: str) -> None:
    names = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder)
    for path in [os.path.join(folder, name) for name in names if name.startswith(marks)]:
        if not _is_held(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_held(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not durable.lock_within(fd, fcntl.LOCK_EX, 0)
    finally:
        os.close(fd)


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
