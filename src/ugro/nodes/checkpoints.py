"""The checkpoints of a job on one node, asked over its link: found, brought here, put there. Typed; nothing is kept.

Many gigabytes pass piece by piece, never more of them under way than the window of a call. What a node says is
checked here: names and sizes as they come, files as they are unpacked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ugro.core.errors import RemoteFailure, UgroError
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.calls import Stream
from ugro.nodes.link import Link
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity
from ugro.nodes.streaming import Pouring, Thread, in_time
from ugro.remote.files import archive, checkpoints

_ANSWER_S = 30.0
_WHAT = "a checkpoint"
_MOST_BYTES = 1 << 50

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Where:
    """Where a job's checkpoints are on every node: by its own choice, or by ours."""

    job: int
    dir: str | None = None
    cwd: str | None = None
    since: float = 0.0  # seconds since the epoch: what a folder of the user's held before is not the job's

    def params(self) -> dict[str, Any]:
        return {"job": str(self.job), "dir": self.dir, "cwd": self.cwd, "since": self.since}


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint on a node. ``fingerprint``: of two with the same, one is a copy of the other."""

    name: str
    kind: str  # file or folder
    bytes: int
    changed_ns: int
    number: int | None
    fingerprint: str
    problem: str | None = None  # why it cannot be sent


@dataclass(frozen=True, slots=True)
class Prepared:
    dir: str
    resume: str | None  # None: the checkpoint to resume from is not there


@dataclass(frozen=True, slots=True)
class _Received:
    resume: str


@dataclass(slots=True)
class NodeCheckpoints:
    node: Node
    identity: Identity
    connect_s: float

    async def prepare(self, where: Where, wanted: Found | None) -> Prepared:
        """Makes the folder to write to; says whether what it resumes from is there."""
        chosen = {"name": wanted.name, "fingerprint": wanted.fingerprint} if wanted else {}
        answer = await self._call("prepare", **where.params(), **chosen)
        return _decoded(Prepared, answer)

    async def newest(self, where: Where) -> list[Found]:
        """The newest one that can be sent, preceded by newer ones that cannot."""
        answer = await self._call("list", **where.params(), count=1)
        return decode_found(answer)

    async def fetch(self, where: Where, found: Found, folder: Path) -> None:
        """Into a folder that is new and empty. It is whole, and on the disk, when this returns."""
        unpacker = archive.Unpacker(str(folder), found.bytes)
        chosen = {"name": found.name, "fingerprint": found.fingerprint}
        async with self._stream("send", **where.params(), **chosen) as (_, stream):
            thread = Thread("checkpoint")
            try:
                pieces = aiter(stream)
                while (piece := await in_time(anext(pieces, None), self.node.spec.name, _WHAT)) is not None:
                    await thread.do(partial(unpacker.feed, piece[1]))
                await stream.result()
                await thread.do(unpacker.finish)
            except archive.ParcelError as error:
                raise RemoteFailure(_sentence(found, error), subject=self.node.spec.name, cause="damaged") from error
            except OSError as error:
                text = f"checkpoint {found.name} cannot be kept: {error.strerror or error}"
                raise UgroError(text, hint=f"look at the disk of {folder.parent}") from error
            finally:
                # By the same thread: perhaps it still writes.
                await thread.do(unpacker.close)
                thread.close()

    async def put(self, where: Where, found: Found, folder: Path) -> str:
        """What is in a folder here becomes what is resumed from there; returns its path there."""
        pieces = archive.pack(str(folder))
        chosen = {"name": found.name, "fingerprint": found.fingerprint, "bytes": found.bytes}
        async with self._stream("receive", **where.params(), **chosen) as (link, stream):
            pouring = Pouring(link, stream, self.node.spec.name, _WHAT)
            thread = Thread("checkpoint")
            try:
                while pouring.is_open and (piece := await thread.do(lambda: next(pieces, None))) is not None:
                    await pouring.send(piece)
                await pouring.end()
            except (archive.ParcelError, OSError) as error:
                raise UgroError(_sentence(found, error), hint=f"it is kept in {folder}") from error
            finally:
                await thread.do(pieces.close)
                thread.close()
            answer = await stream.result()
        return _decoded(_Received, answer).resume

    async def forget(self, where: Where) -> None:
        """Deletes the job's folders there; never one that the user chose."""
        await self._call("forget", **where.params())

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        link = await self.node.ready(self.connect_s)
        return await link.call(f"checkpoints.{method}", self.identity.params(**params), timeout_s=_ANSWER_S)

    @asynccontextmanager
    async def _stream(self, method: str, **params: Any) -> AsyncIterator[tuple[Link, Stream]]:
        link = await self.node.ready(self.connect_s)
        stream = link.stream(f"checkpoints.{method}", self.identity.params(**params))
        try:
            yield link, stream
        finally:
            stream.cancel()


def decode_found(answer: dict[str, Any]) -> list[Found]:
    """A name becomes part of no path here; it is still one that only a checkpoint can have."""
    found = [_decoded(Found, one) for one in answer["found"]] if isinstance(answer.get("found"), list) else []
    for one in found:
        is_sound = (
            one.kind in ("file", "folder")
            and 0 <= one.bytes < _MOST_BYTES
            and abs(one.changed_ns) < 1 << 63
            and (one.problem is not None or _is_fingerprint(one.fingerprint))
        )
        if not checkpoints.is_complete(one.name) or one.number != checkpoints.number(one.name) or not is_sound:
            raise RemoteFailure(f"what it says of a checkpoint makes no sense: {one!r:.200}", cause="damaged")
    return found


def _is_fingerprint(text: str) -> bool:
    return len(text) == 32 and set(text) <= set("0123456789abcdef")


def _decoded(cls: type[T], answer: Any) -> T:
    try:
        return decode(cls, answer)
    except DecodeError as error:
        raise RemoteFailure(f"what it says of its checkpoints makes no sense: {error}", cause="damaged") from error


def _sentence(found: Found, error: Exception) -> str:
    return f"checkpoint {found.name}: {error}"
