"""`files.*`: the files that runs wrote and that the agent fetches or brings to another node.

A call names its files by a run (``job``, ``attempt``) and by ``part``: its outputs, what it left here (``kept``), all
checkpoints of its job (``checkpoints``), or one of them (``checkpoint``). What it left of its outputs and of its
checkpoints is apart (``of``). All of them are listed, sent from any offset and compared in the same way.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from ugro.node import durable, worker
from ugro.node import machine as disk
from ugro.node.files import listing
from ugro.node.files import transfer as received
from ugro.node.files import transfer as resumable
from ugro.node.files.checkpoint_dir import CheckpointDir, Checkpoints
from ugro.node.files.listing import PART, RunFile, Unsendable, is_complete
from ugro.node.files.outputs import ARRIVING, REMOVING, Kept, Outputs, beside, forget_kept, link_all, remove_all
from ugro.node.files.transfer import CHUNK, StreamError
from ugro.node.files.workdir import workdir_of
from ugro.node.program import Call, Refused, method
from ugro.node.runs.logs import open_below
from ugro.node.runs.rundir import RunDir, agent_of, run_of

# --- checkpoints ------------------------------------------------------------------------------------------------------
# The checkpoints of a job on this node: which they are, where they are, and the one that an attempt resumes from.
#
# The contract with a job's program, whatever it is written with:
#
# - It writes its checkpoints into one folder of its working directory, which ``UGRO_CHECKPOINT_DIR`` names. What is in
# it outlives an attempt: the next attempt on this node finds it there again.
# - A checkpoint is one entry of that folder: a file, or a folder with everything in it. It is complete when its name
# neither begins with a dot nor ends in .tmp or .partial: write it under such a name, then rename it.
# - The newest is the one with the highest number at the end of its name, before suffixes such as .pt (``step_000200``,
# ``epoch-3.pt``); a number with a decimal point, or of more than 18 digits, does not count. Names without a number
# come after those with one. Among equals, the attempt that wrote them decides, and then the order in which they were
# written (``checkpoint_dir``). Symbolic links are ignored.
# - ``UGRO_RESUME_DIR`` is a folder with exactly the checkpoint to resume from: the content of one that is a folder, or
# the one file. The program must not write to it. If it is not set, there is nothing to resume from. The same
# checkpoint is in the folder of the checkpoints, under its name.
#
# ``checkpoint_dir`` says where the folder is. One that the user chose is never deleted, and what it contained before
# the
# job was submitted is not the job's.


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


# --- api --------------------------------------------------------------------------------------------------------------


Answer = Dict[str, Any]
Source = Union[Outputs, Kept, Checkpoints, Checkpoint]


# --- any files --------------------------------------------------------------------------------------------------


@method("files.list")
def list_(call: Call, /, **where: Any) -> None:
    source = _source(call, where)
    if not source.has_any():  # most runs write none, and are asked again and again
        call.finish({"unlisted": 0, "now_ns": time.time_ns()})
        return
    worker.send(call, lambda into: _list(source, into))


@method("files.send")
def send(call: Call, /, *, files: List[List[Any]], **where: Any) -> None:
    """Streams files: of each its name, from where on, and the hash of what comes before that."""
    source = _source(call, where)
    wanted = [(listing.name_of(name), int(offset), str(check)) for name, offset, check in files]
    worker.send(call, lambda into: _send(source, wanted, into))


@method("files.hashes")
def hashes(call: Call, /, *, names: List[str], **where: Any) -> None:
    source = _source(call, where)
    wanted = [listing.name_of(name) for name in names]
    worker.do(call, lambda: {"hashes": [_content_hash(source, name) for name in wanted]})


# --- outputs ----------------------------------------------------------------------------------------------------


@method("files.written")
def written(call: Call, *, runs: List[List[Any]]) -> None:
    """Which of many runs have written anything, as positions in the list: one call instead of many."""
    agent = agent_of(call)
    asked = [agent.run(str(job), int(attempt)) for job, attempt in runs]
    found = {place for place, run in enumerate(asked) if run.has_written()}
    unsure = [place for place, run in enumerate(asked) if place not in found and run.has_work()]
    if not unsure:
        call.finish({"written": sorted(found)})
        return

    def look() -> Answer:
        made = {place for place in unsure if workdir_of(asked[place]).has_any()}
        return {"written": sorted(found | made), "cpu_s": time.process_time()}

    worker.do(call, look)


@method("files.keep")
def keep(call: Call, /, *, names: List[str], with_unlisted: bool = False, **where: Any) -> None:
    """Files that are not fetched stay on this node when the run is removed."""
    wanted = [listing.name_of(name) for name in names]
    source: Union[CheckpointDir, Outputs] = Outputs(_run(call, where))
    if where.get("part") == PART:
        source = CheckpointDir(agent_of(call), where)
    worker.do(call, lambda: source.keep(wanted, with_unlisted=with_unlisted is True))


@method("files.drop_kept")
def drop_kept(call: Call, /, *, names: Optional[List[str]] = None, **where: Any) -> None:
    """These files of an attempt; without names, those of all attempts at the job."""
    run = _run(call, where)
    if names is None:
        worker.do(call, lambda: forget_kept(run.agent, run.job))
    else:
        wanted = [listing.name_of(name) for name in names]
        worker.do(call, lambda: _kept(call, where).forget(wanted))


# --- checkpoints ------------------------------------------------------------------------------------------------


@method("files.prepare")
def prepare(call: Call, /, **where: Any) -> None:
    """Creates the folder for checkpoints; returns its path, and that of the checkpoint to resume from if it is here."""
    folder = CheckpointDir(agent_of(call), where)
    resume = _resume(folder, where) if where.get("checkpoint") else None
    if resume is None:
        folder.forget_resumed()

    def work() -> Dict[str, Any]:
        made, older = folder.make(), folder.older()
        return {"dir": made, "resume": resume.find() if resume else None, "older": older}

    worker.do(call, work)


@method("files.newest")
def newest(call: Call, /, **where: Any) -> None:
    """Lists the newest checkpoints of a job."""
    folder = CheckpointDir(agent_of(call), where)
    if folder.is_ours and not folder.has_any():  # most jobs have none, and are asked again and again
        call.finish({"found": []})
        return
    worker.do(call, lambda: {"found": folder.newest()})


@method("files.receive")
def receive(call: Call, /, *, size: int, **where: Any) -> None:
    """Takes a checkpoint as a stream of so many bytes."""
    folder, size = CheckpointDir(agent_of(call), where), int(size)
    resume = _resume(folder, where)
    worker.receive(call, lambda out, took: {"dir": folder.path, "resume": resume.receive(size, out, took)})


@method("files.drop_checkpoints")
def drop_checkpoints(call: Call, /, **where: Any) -> None:
    worker.do(call, CheckpointDir(agent_of(call), where).drop)


def _source(call: Call, where: Dict[str, Any]) -> Source:
    if where.get("checkpoint"):
        return Checkpoint(CheckpointDir(agent_of(call), where), name_in(where))
    if where.get("part") == PART:
        return Checkpoints(CheckpointDir(agent_of(call), where))
    return _kept(call, where) if where.get("part") == "kept" else Outputs(_run(call, where))


def _run(call: Call, where: Dict[str, Any]) -> RunDir:
    return run_of(call, where["job"], where["attempt"])


def _kept(call: Call, where: Dict[str, Any]) -> Kept:
    return Kept(_run(call, where), PART if where.get("of") == PART else "")


def _resume(folder: CheckpointDir, params: Dict[str, Any]) -> Resume:
    kind = "file" if params.get("kind") == "file" else "folder"
    return Resume(folder, name_in(params), kind, fingerprint_in(params))


def _list(source: Source, into: int) -> Answer:
    files = source.files()
    for lines in listing.encoded(itertools.islice(files, listing.MOST_FILES)):
        durable.write_all(into, lines)
    unlisted = sum(1 for _ in files)
    return {"unlisted": unlisted, "now_ns": time.time_ns(), "cpu_s": time.process_time()}  # of this process alone


def _send(source: Source, wanted: List[Tuple[bytes, int, str]], into: int) -> Answer:
    for number, (name, offset, check) in enumerate(wanted):
        fd, problem = _opened(source, name)
        if fd is None:
            durable.write_all(into, resumable.send_problem(number, problem))
            continue
        try:
            for piece in resumable.send(number, fd, offset, check):
                durable.write_all(into, piece)
        finally:
            os.close(fd)
    return {}


def _content_hash(source: Source, name: bytes) -> Optional[str]:
    fd, _ = _opened(source, name)
    if fd is None:
        return None
    try:
        return resumable.content_hash(fd)
    finally:
        os.close(fd)


def _opened(source: Source, name: bytes) -> Tuple[Optional[int], str]:
    try:
        return source.open(name), "it is no longer there"
    except (OSError, Refused) as error:
        return None, str(error)
