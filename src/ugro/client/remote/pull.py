"""Copies the results of a job from a master to a folder here: equal files are skipped, different ones not overwritten.

Each file is checked by its hash, and gets its name when it is complete. After a link that broke, it continues at the
byte; after an interruption, the next pull skips what is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote_to_bytes

from ugro.client.http import AgentGone, lines
from ugro.client.path import path_of
from ugro.client.retrying import trying_again
from ugro.core.errors import UgroError, error_from_wire
from ugro.remote import wire

if TYPE_CHECKING:
    from ugro.client.client import Client

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
        files = [_placed(one, target) for one in lines(self._stream("GET", "files", None))]
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
        body = {
            "files": [{"name": name, "offset": offset} for name, offset in files],
            "attempt": self.attempt or None,
            "only_hash": only_hash,
        }
        asked, decoder, name = {name for name, _ in files}, wire.Decoder(), ""
        for content in self._stream("POST", "content", body):
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

    def _stream(self, method: str, what: str, body: Any) -> Iterator[bytes]:
        query = f"?attempt={self.attempt}" if self.attempt and body is None else ""
        path = f"{path_of('jobs', self.job)}/results/{what}{query}"
        stream: Iterator[bytes] = self.client.streamed(method, path, body)
        return stream


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


def _placed(about: dict[str, Any], target: bytes) -> _Remote:
    """Raises UgroError for a name that leads elsewhere."""
    name = str(about["name"])
    path = unquote_to_bytes(name)
    if b"\0" in path or any(part in (b"", b".", b"..") for part in path.split(b"/")):
        raise UgroError(f"the master names a file {name[:200]!r}, which leads out of the folder")
    to = os.path.join(target, path)
    return _Remote(name, to, int(about["bytes"]), int(about["mode"]), int(about["modified_ns"]))


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
