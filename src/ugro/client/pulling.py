"""``client.pull``: copies the results of a job to a folder of this machine, from wherever the agent keeps them.

Equal files are skipped, different ones are not overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote_to_bytes

from ugro.client.http import AgentGone, trying_again
from ugro.kernel.files.model import JobResults, Part, ResultState
from ugro.kernel.files.operations import FileEntry, GetJobResults, ListResultFiles, ReadResultFiles, WantedFile
from ugro.kernel.jobs.model import Job
from ugro.kernel.support.errors import NotAllowed, UgroError, error_from_wire
from ugro.node import wire

if TYPE_CHECKING:
    from ugro.client.client import Client


# --- pull -------------------------------------------------------------------------------------------------------------
# Copies the results of a job from a master to a folder here: equal files are skipped, different ones not overwritten.
#
# Each file is checked by its hash, and gets its name when it is complete. After a link that broke, it continues at the
# byte; after an interruption, the next pull skips what is complete.


_AT_ONCE = 200  # files in one request
_MOST_NAMED = 5
_MOST_DAMAGED = 3


class Conflict(Exception):
    """Files there differ; nothing was copied."""


@dataclass(slots=True)
class Pulled:
    files: int = 0
    bytes: int = 0
    same: int = 0
    seen_bytes: int = 0  # copied, or equal


@dataclass(frozen=True, slots=True)
class _Remote:
    """A file there, and where it goes here."""

    name: str
    to: bytes
    size: int
    mode: int
    modified_ns: int


@dataclass(slots=True)
class RemoteResults:
    """The results of one attempt of a job."""

    client: Client
    job: int
    attempt: int
    on_progress: Callable[[Pulled], None]
    done: Pulled = field(default_factory=Pulled)

    def pull(self, target: bytes, *, is_forced: bool) -> Pulled:
        """Raises Conflict, OSError, UgroError."""
        listed = self.client.follow(ListResultFiles(str(self.job), self.attempt or None))
        files = [_placed(one, target) for one in listed]
        there = [one for one in files if os.path.lexists(one.to)]
        same = self._same([one for one in there if _is_of_size(one)])
        differing = [one.to for one in there if one.name not in same]
        if differing and not is_forced:
            raise Conflict(conflict(differing))
        self.done.same = len(same)
        self.done.seen_bytes = sum(one.size for one in there if one.name in same)
        missing = [one for one in files if one.name not in same]
        for at in range(0, len(missing), _AT_ONCE):
            self._fetch(missing[at : at + _AT_ONCE])
        return self.done

    def _same(self, files: Sequence[_Remote]) -> set[str]:
        """Those whose content is here already."""
        found: set[str] = set()
        for at in range(0, len(files), _AT_ONCE):
            some = {one.name: one for one in files[at : at + _AT_ONCE]}
            for again in trying_again():
                try:
                    for name, _, answer in self._content([(name, 0) for name in some], only_hash=True):
                        again()
                        if answer is not None and answer["sha256"] == _digest(some[name].to):
                            found.add(name)
                except AgentGone:
                    continue
                break
        return found

    def _fetch(self, files: Sequence[_Remote]) -> None:
        with contextlib.ExitStack() as stack:
            under_way = {one.name: _Arriving(one) for one in files}
            for arriving in under_way.values():
                stack.callback(arriving.discard)
            for again in trying_again():
                try:
                    self._receive(under_way, again)
                except AgentGone:
                    continue
                if not under_way:
                    return

    def _receive(self, under_way: dict[str, _Arriving], again: Callable[[], None]) -> None:
        """What is complete leaves ``under_way``."""
        wanted = [(name, one.size) for name, one in under_way.items()]
        for name, piece, answer in self._content(wanted):
            again()
            arriving = under_way[name]
            if answer is None:
                arriving.add(piece)
                self.done.bytes += len(piece)
                self.done.seen_bytes += len(piece)
            elif arriving.is_whole(answer):
                arriving.keep()
                del under_way[name]
                self.done.files += 1
            else:  # it changed there, or was damaged: from its beginning
                self.done.bytes -= arriving.size
                self.done.seen_bytes -= arriving.size
                arriving.again()
            self.on_progress(self.done)

    def _content(
        self, files: Sequence[tuple[str, int]], *, only_hash: bool = False
    ) -> Iterator[tuple[str, bytes, dict[str, Any] | None]]:
        """A piece of a file, or at its end what is known of it."""
        wanted = tuple(WantedFile(name, offset) for name, offset in files)
        asked, decoder, name = {name for name, _ in files}, wire.Decoder(), ""
        for content in self.client.streamed(ReadResultFiles(str(self.job), wanted, self.attempt or None, only_hash)):
            for kind, _, payload in decoder.feed(content):
                if kind == wire.CALL:
                    name = str(wire.parse(payload)["name"])
                    if name not in asked:
                        raise UgroError(f"the master sends {name[:200]!r}, which nobody asked for")
                elif kind == wire.OUT:
                    yield name, payload, None
                elif kind == wire.RESULT:
                    yield name, b"", wire.parse(payload)
                elif kind == wire.ERROR:
                    raise error_from_wire(wire.parse(payload))


class _Arriving:
    """A file that is being written, under another name."""

    def __init__(self, file: _Remote) -> None:
        self._file = file
        self._fresh = os.path.join(os.path.dirname(file.to), b".ugro-" + os.urandom(8).hex().encode())
        self._stream: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._damaged = 0
        self.size = 0

    def add(self, piece: bytes) -> None:
        self._opened().write(piece)
        self._digest.update(piece)
        self.size += len(piece)

    def is_whole(self, answer: dict[str, Any]) -> bool:
        return answer.get("bytes") == self.size and answer.get("sha256") == self._digest.hexdigest()

    def keep(self) -> None:
        stream, self._stream = self._opened(), None
        stream.close()
        os.chmod(self._fresh, self._file.mode & 0o777)
        os.utime(self._fresh, ns=(self._file.modified_ns, self._file.modified_ns))
        os.replace(self._fresh, self._file.to)

    def again(self) -> None:
        self._damaged += 1
        if self._damaged >= _MOST_DAMAGED:
            raise UgroError(f"{self._file.name} changes faster than it can be copied", hint="try again later")
        self.discard()
        self._digest, self.size = hashlib.sha256(), 0

    def discard(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._fresh)

    def _opened(self) -> BinaryIO:
        if self._stream is None:
            os.makedirs(os.path.dirname(self._file.to), exist_ok=True)
            self._stream = open(self._fresh, "xb")  # noqa: SIM115  # until it is complete
        return self._stream


def _placed(about: FileEntry, target: bytes) -> _Remote:
    """Raises UgroError for a name that leads elsewhere."""
    name = about.name
    path = unquote_to_bytes(name)
    if b"\0" in path or any(part in (b"", b".", b"..") for part in path.split(b"/")):
        raise UgroError(f"the master names a file {name[:200]!r}, which leads out of the folder")
    to = os.path.join(target, path)
    return _Remote(name, to, about.bytes, about.mode, about.modified_ns)


def _is_of_size(one: _Remote) -> bool:
    with contextlib.suppress(OSError):
        about = os.lstat(one.to)
        return stat.S_ISREG(about.st_mode) and about.st_size == one.size
    return False


def _digest(path: bytes) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def conflict(differing: Sequence[bytes]) -> str:
    named = ", ".join(_shown(path) for path in differing[:_MOST_NAMED])
    more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    return f"{'these differ' if len(differing) > 1 else 'this differs'} there: {named}{more}"


def _shown(path: bytes) -> str:
    text = os.fsdecode(path)
    return text if text.isprintable() else repr(text)


# --- pulling ----------------------------------------------------------------------------------------------------------


_PIECE_BYTES = 1 << 20
_LOOK_S = 0.3
_TIMES = b".times"  # the index beside a log


def arrived(
    client: Client, word: str | int, attempt: int | None, on_wait: Callable[[JobResults], None]
) -> tuple[Job, JobResults]:
    """Waits until the results are collected; ``last`` stays the same job."""
    found = client.ask(GetJobResults(str(word), attempt))
    while found.results.state is ResultState.COMING:
        on_wait(found.results)
        time.sleep(_LOOK_S)
        found = client.ask(GetJobResults(str(found.job.id), attempt))
    return found.job, found.results


def pull(
    client: Client, made: JobResults, target: Path, *, is_forced: bool, on_progress: Callable[[Pulled], None]
) -> Pulled:
    if made.state is ResultState.REMOVED:
        raise NotAllowed(f"the results of job {made.job} were removed")
    try:
        if client.master is None:
            return _copied(made, target, is_forced=is_forced, on_progress=on_progress)
        remote = RemoteResults(client, made.job, made.attempt, on_progress)
        return remote.pull(os.fsencode(target), is_forced=is_forced)
    except Conflict as error:
        raise UgroError(str(error), hint="overwrite them with --force, or choose another directory") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = "the files copied so far are complete; try again"
        raise UgroError(f"cannot copy to {target}: {reason}", hint=hint) from error


def _copied(results: JobResults, target: Path, *, is_forced: bool, on_progress: Callable[[Pulled], None]) -> Pulled:
    _expect_readable(results.parts)
    done = Pulled()
    pairs = [pair for part in results.parts for pair in _pairs(part, os.fsencode(target))]
    is_there = [_is_same(source, to) for source, to in pairs]
    differing = [to for (_, to), same in zip(pairs, is_there, strict=True) if same is False]
    if differing and not is_forced:
        raise Conflict(conflict(differing))
    for (source, to), same in zip(pairs, is_there, strict=True):
        if same:
            done.same += 1
            done.seen_bytes += os.path.getsize(source)
        else:
            _copy(source, to, done, on_progress)
            done.files += 1
        on_progress(done)
    return done


def _expect_readable(parts: Sequence[Part]) -> None:
    """Raises NotAllowed for the files of an agent that another user runs."""
    for part in parts:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.stat(part.path)
        except PermissionError as error:
            hint = "download them from the dashboard: ugro dashboard"
            raise NotAllowed(f"{part.path} cannot be read: it is the agent's", hint=hint) from error


def _pairs(part: Part, target: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Regular files only; links are not followed."""
    path, base = os.fsencode(part.path), os.path.join(target, os.fsencode(part.name))
    if _is_file(path):
        yield path, base
    for folder, _, names in os.walk(path):
        for name in sorted(names):
            source = os.path.join(folder, name)
            if _is_file(source) and not (part.name == "logs" and name.endswith(_TIMES)):
                yield source, os.path.normpath(os.path.join(base, os.path.relpath(source, path)))


def _is_file(path: bytes) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def _is_same(source: bytes, to: bytes) -> bool | None:
    """None if there is none yet."""
    if not os.path.lexists(to):
        return None
    if not _is_file(to) or os.path.getsize(to) != os.path.getsize(source):
        return False
    with open(source, "rb") as one, open(to, "rb") as two:
        while (piece := one.read(_PIECE_BYTES)) == two.read(_PIECE_BYTES):
            if not piece:
                return True
    return False


def _copy(source: bytes, to: bytes, done: Pulled, on_progress: Callable[[Pulled], None]) -> None:
    """Under another name first: an interruption leaves complete files only."""
    os.makedirs(os.path.dirname(to), exist_ok=True)
    fresh = os.path.join(os.path.dirname(to), b".ugro-" + secrets.token_hex(8).encode())
    try:
        with open(source, "rb") as one, open(fresh, "xb") as two:
            while piece := one.read(_PIECE_BYTES):
                two.write(piece)
                done.bytes += len(piece)
                done.seen_bytes += len(piece)
                on_progress(done)
        about = os.stat(source)
        os.chmod(fresh, stat.S_IMODE(about.st_mode))
        os.utime(fresh, ns=(about.st_atime_ns, about.st_mtime_ns))
        os.replace(fresh, to)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
