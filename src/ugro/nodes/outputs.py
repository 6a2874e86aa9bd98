"""A run's outputs on one node, asked over its link: listed, brought here, compared. Typed; nothing is kept.

What a node says is checked here, before anybody makes a path of it: names, sizes, and how much comes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ugro.core.errors import RemoteFailure
from ugro.nodes.calls import Stream
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity
from ugro.nodes.streaming import Thread, in_time
from ugro.policy.result_selection import OutputFile
from ugro.remote import wire
from ugro.remote.files import outputs, resumable
from ugro.remote.files.resumable import Head

T = TypeVar("T")

_ANSWER_S = 60.0
_COMPARE_S = 3600.0
_WHAT = "a run's output"
_MOST_LINE_BYTES = 64 * 1024
_MOST_NAME_BYTES = 255
_MOST_PATH_BYTES = 4000
_MOST_PROBLEM = 100
_MESSAGE_BYTES = wire.MAX_PAYLOAD // 2


@dataclass(frozen=True, slots=True)
class Listing:
    files: tuple[OutputFile, ...]
    passed_over: int  # how many there are beyond what is listed
    now_ns: int  # by the node's clock


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file from an offset on; ``check`` is of what we have before it."""

    file: OutputFile
    offset: int = 0
    check: str = ""


@dataclass(frozen=True, slots=True)
class Sink:
    """Told of what comes, file by file, in one thread."""

    begin: Callable[[Head], None]
    write: Callable[[bytes], None]
    end: Callable[[int], None]
    close: Callable[[], None]  # however it went


async def filled(
    node: Node, identity: Identity, connect_s: float, runs: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Of these runs there (job and attempt), those that have written anything to be kept."""
    link = await node.ready(connect_s)
    asked = [[str(job), attempt] for job, attempt in runs]
    answer = await link.call("outputs.filled", identity.params(runs=asked), timeout_s=_ANSWER_S)
    try:
        return [runs[int(place)] for place in answer["filled"] if int(place) >= 0]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        text = f"what it says of its outputs makes no sense: {error!r:.100}"
        raise RemoteFailure(text, subject=node.spec.name, cause="damaged") from error


@dataclass(slots=True)
class NodeOutputs:
    node: Node
    identity: Identity
    connect_s: float
    job: int
    attempt: int

    async def list(self) -> Listing:
        found: list[OutputFile] = []
        unread = b""
        async with self._stream("list") as stream:
            pieces_ = aiter(stream)
            while (piece := await in_time(anext(pieces_, None), self._name, _WHAT)) is not None:
                *lines, unread = (unread + piece[1]).split(b"\n")
                if len(unread) > _MOST_LINE_BYTES or len(found) + len(lines) > outputs.MOST_FILES:
                    raise self._damaged("it lists more than it may")
                found += [parsed(line) for line in lines]
            answer = await stream.result()
        try:
            return Listing(tuple(found), max(0, int(answer["files"]) - len(found)), int(answer["now_ns"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"{error!r:.100}") from error

    async def fetch(self, wanted: Sequence[Wanted], sink: Sink) -> None:
        """Raises what the sink raises."""
        reader = resumable.Reader([one.offset for one in wanted], sink.begin, sink.write, sink.end)
        files = [[_text(one.file.name), one.offset, one.check] for one in wanted]
        thread = Thread("results")
        try:
            async with self._stream("send", files=files) as stream:
                pieces_ = aiter(stream)
                while (piece := await in_time(anext(pieces_, None), self._name, _WHAT)) is not None:
                    await thread.do(partial(reader.feed, piece[1]))
                await stream.result()
                reader.finish()
        except resumable.PiecesError as error:
            raise self._damaged(str(error)) from error
        finally:
            # By the same thread: perhaps it still writes.
            await thread.do(sink.close)
            thread.close()

    async def hashes(self, names: Sequence[bytes]) -> dict[bytes, str | None]:
        """Of whole contents; None for what cannot be read there (any more)."""
        found: dict[bytes, str | None] = {}
        for part in packed(names, lambda name: name):
            answer = await self._call("hashes", _COMPARE_S, names=[_text(name) for name in part])
            told = answer.get("hashes")
            if not isinstance(told, list) or len(told) != len(part):
                raise self._damaged("hashes")
            found |= dict(zip(part, (one if isinstance(one, str) else None for one in told), strict=True))
        return found

    async def keep(self, names: Sequence[bytes]) -> None:
        """Before the run is removed: these files stay on the node."""
        for part in packed(names, lambda name: name):
            await self._call("keep", _ANSWER_S, names=[_text(name) for name in part])

    async def forget(self) -> None:
        """What stayed there of all attempts at the job is deleted."""
        await self._call("forget", _COMPARE_S)

    @property
    def _name(self) -> str:
        return self.node.spec.name

    def _damaged(self, text: str) -> RemoteFailure:
        return RemoteFailure(f"what it says of its outputs makes no sense: {text}", subject=self._name, cause="damaged")

    def _params(self, **more: Any) -> dict[str, Any]:
        return self.identity.params(job=str(self.job), attempt=self.attempt, **more)

    async def _call(self, method: str, timeout_s: float, **params: Any) -> dict[str, Any]:
        link = await self.node.ready(self.connect_s)
        return await link.call(f"outputs.{method}", self._params(**params), timeout_s=timeout_s)

    @asynccontextmanager
    async def _stream(self, method: str, **params: Any) -> AsyncIterator[Stream]:
        link = await self.node.ready(self.connect_s)
        stream = link.stream(f"outputs.{method}", self._params(**params))
        try:
            yield stream
        finally:
            stream.cancel()


def parsed(line: bytes) -> OutputFile:
    """One that cannot be a file below a folder is damage, and nothing of the list is believed."""
    try:
        text, size, changed_ns, inode, problem = json.loads(line)
        name = text.encode("utf-8", "surrogateescape")
        numbers = (size, changed_ns, inode)
        is_sound = all(type(number) is int for number in numbers) and 0 <= size < resumable.MOST_BYTES
        if not is_sound or not is_name(name) or not isinstance(problem, str | None):
            raise ValueError("a path that leads elsewhere, or no file")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        text = f"what it says of its outputs makes no sense: {error}: {line!r:.100}"
        raise RemoteFailure(text, cause="damaged") from error
    return OutputFile(name, size, changed_ns, inode, problem[:_MOST_PROBLEM] if problem else None)


def is_name(name: bytes) -> bool:
    """Whether it leads to a place below any folder it is put together with, and nowhere else."""
    parts = name.split(b"/")
    if b"\0" in name or len(name) > _MOST_PATH_BYTES or len(parts) > outputs.MOST_DEPTH + 2:
        return False
    return all(part not in (b"", b".", b"..") and len(part) <= _MOST_NAME_BYTES for part in parts)


def packed(items: Sequence[T], name_of: Callable[[T], bytes], most: int = 1000) -> Iterator[list[T]]:
    """As many as can be named in one message."""
    part: list[T] = []
    size = 0
    for item in items:
        length = len(json.dumps(_text(name_of(item)))) + 200
        if part and (size + length > _MESSAGE_BYTES or len(part) >= most):
            yield part
            part, size = [], 0
        part.append(item)
        size += length
    if part:
        yield part


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
