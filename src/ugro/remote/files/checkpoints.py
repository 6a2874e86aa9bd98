"""`checkpoints.*`: what a job can resume from, on this node: found, sent, received, deleted.

The contract with a job's program, whatever it is written with:

- It writes its checkpoints into the folder ``UGRO_CHECKPOINT_DIR``, which is the job's and stays when an attempt ends.
- A checkpoint is one entry of that folder: a file, or a folder with all in it. It is complete when its name neither
  begins with a dot nor ends in .tmp or .partial: write it under such a name, then rename it.
- The newest is the one with the highest number at the end of its name, before endings such as .pt (``step_000200``,
  ``epoch-3.pt``); a number with a decimal point, or of more than 18 digits, is none. Names without a number come
  after those with one, by the time they were last changed. Symbolic links are passed over.
- ``UGRO_RESUME_DIR`` is a folder that holds exactly the checkpoint to resume from: the content of the one that is a
  folder, or the one file. It is not to be written to. When it is not set, there is nothing to resume from.

A folder that the user chose is never deleted, and what was in it before the job was submitted is not the job's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from ugro.remote import durable, worker
from ugro.remote.files import archive
from ugro.remote.program import Call, Refused
from ugro.remote.state.rundir import AgentDir

_MOST_LOOKED_AT = 20
_MOST_NAME_BYTES = 255
_SPARE_BYTES = 64 << 20  # left free on a disk, for what others write meanwhile
_ARRIVING = ".arriving."
_REMOVING = ".removing."
_ENDINGS = re.compile(r"(\.[A-Za-z][A-Za-z0-9_]*)+$")
_NUMBER = re.compile(r"(?:^|[^0-9.]|(?:^|[^0-9])\.)([0-9]{1,18})$")

Answer = Dict[str, Any]


def prepare(call: Call, params: Dict[str, Any]) -> None:
    """Makes the folder; says where it is, and where the checkpoint to resume from is, if that is here."""
    place = _Place(call, params)
    name, wanted = params.get("name"), params.get("fingerprint")
    if wanted is None:
        worker.do(call, lambda: {"dir": place.make(), "resume": None})
        return
    resumed = _Resumed(place, _name(name), _fingerprint(wanted))
    worker.do(call, lambda: {"dir": place.make(), "resume": resumed.find()})


def list_(call: Call, params: Dict[str, Any]) -> None:
    place = _Place(call, params)
    if place.is_ours and not place.has_any():  # most jobs have none, and are asked for them again and again
        call.finish({"found": []})
        return
    worker.do(call, lambda: {"found": place.newest(int(params.get("count", 1)))})


def send(call: Call, params: Dict[str, Any]) -> None:
    path = os.path.join(_Place(call, params).path, _name(params["name"]))
    wanted = _fingerprint(params["fingerprint"])
    worker.send(call, lambda into: _send(path, wanted, into))


def receive(call: Call, params: Dict[str, Any]) -> None:
    resumed = _Resumed(_Place(call, params), _name(params["name"]), _fingerprint(params["fingerprint"]))
    size = int(params["bytes"])
    worker.receive(call, lambda out, took: {"resume": resumed.receive(size, out, took)})


def forget(call: Call, params: Dict[str, Any]) -> None:
    place = _Place(call, params)
    worker.do(call, place.forget)


METHODS: Dict[str, Callable[[Call, Dict[str, Any]], None]] = {
    "prepare": prepare,
    "list": list_,
    "send": send,
    "receive": receive,
    "forget": forget,
}


# --- which they are ---------------------------------------------------------------------------------------------


def is_complete(name: str) -> bool:
    if name.startswith(".") or name.endswith((".tmp", ".partial")):
        return False
    return name.isprintable() and "/" not in name and 0 < len(os.fsencode(name)) <= _MOST_NAME_BYTES


def number(name: str) -> Optional[int]:
    """The one at the end of the name, before endings such as .pt."""
    found = _NUMBER.search(_ENDINGS.sub("", name))
    return int(found.group(1)) if found else None


class Entry:
    """A complete checkpoint, as its name and its first look tell."""

    def __init__(self, name: str, kind: str, changed_ns: int) -> None:
        self.name = name
        self.kind = kind
        self.changed_ns = changed_ns
        self.number = number(name)

    @property
    def order(self) -> Tuple[int, int, str]:
        """The newest has the highest."""
        return (-1 if self.number is None else self.number, self.changed_ns, self.name)


def entries(folder: str, since_ns: int) -> List[Entry]:
    """The complete ones, newest first."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if is_complete(entry.name):
                with contextlib.suppress(FileNotFoundError):  # programs delete their old ones at any time
                    status = entry.stat(follow_symlinks=False)
                    kind = _kind(status.st_mode)
                    if kind and status.st_mtime_ns >= since_ns:
                        found.append(Entry(entry.name, kind, status.st_mtime_ns))
    return sorted(found, key=lambda entry: entry.order, reverse=True)


def _kind(mode: int) -> Optional[str]:
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else None


# --- where they are ---------------------------------------------------------------------------------------------


class _Place:
    """A job's folders on this node."""

    def __init__(self, call: Call, params: Dict[str, Any]) -> None:
        self.agent = AgentDir(call.program.root, str(params["agent"]), call.program.node_key)
        self.agent.admit(int(params["generation"]))
        self.job = self.agent.run(str(params["job"]), 1).job
        self._base = os.path.join(self.agent.path, "checkpoints")
        self._default = os.path.join(self._base, self.job)
        self.resume = os.path.join(self.agent.path, "resume", self.job)
        self.path, self.is_ours = self._choose(params.get("dir"), params.get("cwd"))
        self._since_ns = 0 if self.is_ours else int(float(params.get("since") or 0) * 1e9)

    def _choose(self, chosen: Optional[str], cwd: Optional[str]) -> Tuple[str, bool]:
        if not chosen:
            return self._default, True
        path = os.path.expanduser(str(chosen))
        if "\0" in path or ".." in path.split("/"):
            raise ValueError("no folder for checkpoints: %.200r" % path)
        if os.path.isabs(path):
            return path, False
        if not cwd:
            return os.path.join(self._default, path), True
        below = os.path.expanduser(str(cwd))
        if not os.path.isabs(below):
            raise ValueError("cwd must be absolute or begin with ~: %.200r" % below)
        return os.path.join(below, path), False

    def make(self) -> str:
        if self.is_ours:
            durable.make_folder(self.path)
            return self.path
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise Refused("checkpoint-dir", "checkpoint.dir cannot be made: %s" % error) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise Refused("checkpoint-dir", "checkpoint.dir cannot be written to: %s" % self.path)
        return self.path

    def has_any(self) -> bool:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            return any(True for _ in found)
        return False

    def newest(self, count: int) -> List[Answer]:
        """As many as can be sent, and those newer ones that cannot, with the reason."""
        found: List[Answer] = []
        for entry in entries(self.path, self._since_ns)[:_MOST_LOOKED_AT]:
            if count > 0:
                with contextlib.suppress(FileNotFoundError):
                    found.append(self._describe(entry))
                    count -= found[-1]["problem"] is None
        return found

    def _describe(self, entry: Entry) -> Answer:
        described = {"name": entry.name, "kind": entry.kind, "number": entry.number, "changed_ns": entry.changed_ns}
        try:
            fingerprint, size = archive.fingerprint(os.path.join(self.path, entry.name))
        except archive.ParcelError as error:
            return {**described, "bytes": 0, "fingerprint": "", "problem": str(error)}
        return {**described, "bytes": size, "fingerprint": fingerprint, "problem": None}

    def forget(self) -> Answer:
        # A supervisor outlives its last word by a moment; its ranks do not.
        if any(run.job == self.job and run.exit() is None and run.is_alive() for run in self.agent.runs()):
            raise Refused("busy", "job %s runs here: its checkpoints stay" % self.job)
        for folder in (self._default, self.resume):
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, _beside(folder, _REMOVING))
            _remove_all(os.path.dirname(folder), _REMOVING)
        return {}


# --- what is resumed from ---------------------------------------------------------------------------------------


class _Resumed:
    """The checkpoint that the next attempt resumes from; in a folder named for what is in it, so whole or not there."""

    def __init__(self, place: _Place, name: str, fingerprint: str) -> None:
        self._place = place
        self._name = name
        self._fingerprint = fingerprint
        self._path = os.path.join(place.resume, fingerprint)

    def find(self) -> Optional[str]:
        written = os.path.join(self._place.path, self._name)
        if _is_same(self._path, self._fingerprint) or (_is_same(written, self._fingerprint) and self._take(written)):
            return self._path
        # A folder on another file system is resumed from where it is, rather than sent here once more.
        return written if os.path.isdir(written) and _is_same(written, self._fingerprint) else None

    def _take(self, written: str) -> bool:
        """By other names for the same files: the program may delete its own at any time."""
        with self._arriving() as folder:
            try:
                archive.link(written, folder)
            except OSError:
                return False
            self._settle(folder)
        return _is_same(self._path, self._fingerprint)

    def receive(self, size: int, out: int, took: Callable[[int], None]) -> str:
        with self._arriving() as folder:
            _expect_room(folder, size)
            unpacker = archive.Unpacker(folder, size)
            try:
                for piece in iter(lambda: os.read(out, archive.CHUNK), b""):
                    unpacker.feed(piece)
                    took(len(piece))
                unpacker.finish()
            except archive.ParcelError as error:
                raise Refused("damaged", "checkpoint %s: %s" % (self._name, error)) from error
            finally:
                unpacker.close()
            self._settle(folder)
        return self._path

    @contextlib.contextmanager
    def _arriving(self) -> Iterator[str]:
        """A folder of our own. Those whose maker is gone, and with it his lock, are deleted on the way."""
        durable.make_folder(self._place.resume)
        _remove_all(self._place.resume, _ARRIVING, _REMOVING)
        folder = os.path.join(self._place.resume, _ARRIVING + os.urandom(8).hex())
        os.mkdir(folder, 0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield folder
        finally:
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)

    def _settle(self, folder: str) -> None:
        """In one step; then what earlier attempts resumed from goes."""
        if os.path.lexists(self._path) and not _is_same(self._path, self._fingerprint):
            os.rename(self._path, _beside(self._path, _REMOVING))
        if not os.path.lexists(self._path):
            os.rename(folder, self._path)
            durable.sync_folder(self._place.resume)
        for name in os.listdir(self._place.resume):
            if name != self._fingerprint and not name.startswith("."):
                old = os.path.join(self._place.resume, name)
                os.rename(old, _beside(old, _REMOVING))
        _remove_all(self._place.resume, _REMOVING)


def _send(path: str, wanted: str, into: int) -> Answer:
    try:
        _expect_same(path, wanted)
        for piece in archive.pack(path):
            durable.write_all(into, piece)
        _expect_same(path, wanted)
    except archive.ParcelError as error:
        raise Refused("changed", "checkpoint %s: %s" % (os.path.basename(path), error)) from error
    except FileNotFoundError as error:
        raise Refused("changed", "checkpoint %s is no longer there" % os.path.basename(path)) from error
    return {}


def _expect_same(path: str, wanted: str) -> None:
    if archive.fingerprint(path)[0] != wanted:
        raise archive.ParcelError("it changed; give a checkpoint its name when it is complete")


def _is_same(path: str, wanted: str) -> bool:
    try:
        return archive.fingerprint(path)[0] == wanted
    except (OSError, archive.ParcelError):
        return False


def _expect_room(folder: str, size: int) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if size + _SPARE_BYTES > free:
        raise Refused("no-space", "a checkpoint of %d MB does not fit: %d MB are free" % (size >> 20, free >> 20))


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


def _name(name: Any) -> str:
    if not isinstance(name, str) or not is_complete(name):
        raise ValueError("no name of a checkpoint: %.80r" % name)
    return name


def _fingerprint(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-f]{32}", str(value)):
        raise ValueError("no fingerprint: %.80r" % value)
    return str(value)
