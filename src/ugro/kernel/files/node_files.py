"""The files of runs on one node, over its link: listed, fetched, compared, put there. Typed; holds no state.

Everything a node says is checked here, before anybody joins a path with it: names, sizes, and how much arrives. Many
gigabytes pass piece by piece, never more of them at once than the window of a call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ugro.kernel.links.calls import Stream
from ugro.kernel.links.link import Link
from ugro.kernel.links.node import NodeCalls
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import RemoteFailure, TimedOut, UgroError
from ugro.node import wire
from ugro.node.files import api, listing
from ugro.node.files import listing as checkpoint_names
from ugro.node.files import transfer as received
from ugro.node.files import transfer as resumable
from ugro.node.files.listing import PART, RunFile, Unsendable
from ugro.node.files.transfer import StreamError, Writer

# --- what transfers share ---------------------------------------------------------------------------------------------
# All transfers over a link share calls and streams, flow control, one thread for files, and a limit on stalls.


# A transfer may take hours; one without progress for so long has failed.
STALL_S = 60.0

T = TypeVar("T")


async def in_time(work: Awaitable[T], node: str, what: str, stall_s: float = STALL_S) -> T:
    try:
        async with asyncio.timeout(stall_s):
            return await work
    except TimeoutError as error:
        raise TimedOut(f"{what} made no progress for {stall_s:g} s", subject=node) from error


class Thread:
    """One thread for one transfer: work is done in order, also after its caller stopped waiting for it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False)


class Upload:
    """Sends bytes to a node, never more at once than its window has room for."""

    def __init__(self, link: Link, stream: Stream, node: str, what: str, window: int = wire.WINDOW) -> None:
        self.is_open = True
        self._link = link
        self._number = stream.number
        self._taken = aiter(stream)
        self._node = node
        self._what = what
        self._untaken = 0
        self._window = window

    async def send(self, piece: bytes) -> None:
        while self.is_open and self._untaken + len(piece) > self._window:
            await self._wait()
        if self.is_open and piece:
            self._untaken += len(piece)
            self._link.send(wire.INPUT, self._number, piece)

    async def end(self) -> None:
        if self.is_open:
            self._link.send(wire.INPUT, self._number)
        while self.is_open:
            await self._wait()

    async def _wait(self) -> None:
        """Until the node has taken some, or the call is over; its result says why."""
        frame = await in_time(anext(self._taken, None), self._node, self._what)
        if frame is None:
            self.is_open = False
            return
        amount = wire.AMOUNT.unpack(frame[1])[0] if len(frame[1]) == wire.AMOUNT.size else -1
        if not 0 < amount <= self._untaken:
            raise RemoteFailure("it acknowledged bytes that were not sent", subject=self._node, cause="damaged")
        self._untaken -= amount


# --- the files of runs ------------------------------------------------------------------------------------------------


Source = Mapping[str, Any]  # which files of a node: the outputs of a run, or a checkpoint

_ANSWER_S = 60.0
_COMPARE_S = 3600.0
_WHAT = "a transfer of files"
_MOST_CPU_S = 60.0
_MOST_UNLISTED = 1 << 40
_MOST_FOUND = 100  # checkpoints in one answer; the node sends the newest and those that cannot be sent
_MOST_LINE_BYTES = 64 * 1024
_MOST_ATTEMPTS = 10**9
_MOST_LIST_BYTES = 64 << 20
_MESSAGE_BYTES = wire.MAX_PAYLOAD // 2


@dataclass(frozen=True, slots=True)
class Listing:
    files: tuple[RunFile, ...]
    unlisted: int  # how many more there are
    now_ns: int  # by the clock of the node
    cpu_s: float = 0.0  # what it cost the node


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file from an offset on; ``check`` is of the bytes we have before it."""

    file: RunFile
    offset: int = 0
    check: str = ""


@dataclass(frozen=True, slots=True)
class Where:
    """Where the checkpoints of a job are on every node: the folder it chose, or ours."""

    job: int
    dir: str | None = None
    cwd: str | None = None
    age_s: float = 0.0  # since it was submitted: what a folder of the user contained before is not the job's
    attempt: int = 1  # in whose working directory the folder is

    def params(self) -> dict[str, Any]:
        named = {"job": str(self.job), "attempt": self.attempt}
        return {**named, "dir": self.dir, "cwd": self.cwd, "age_s": self.age_s}


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint on a node. Two with the same fingerprint are copies of each other."""

    name: str
    kind: str  # file or folder
    bytes: int
    changed_ns: int
    number: int | None
    fingerprint: str
    problem: str | None = None  # why it cannot be sent
    attempt: int = 0  # in which it was written; 0: not known
    serial: int = 0  # the higher, the later its node saw it first; 0: not known


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where an attempt writes checkpoints on a node, and what it resumes from, if that is there."""

    dir: str
    resume: str | None
    older: tuple[str, ...] = ()  # some in a folder of the user that are older than the job, and so not the job's

    @property
    def env(self) -> dict[str, str]:
        resume = {"UGRO_RESUME_DIR": self.resume} if self.resume else {}
        return {"UGRO_CHECKPOINT_DIR": self.dir, **resume}


def outputs_of(job: int, attempt: int) -> Source:
    return {"job": str(job), "attempt": attempt}


def kept_of(job: int, attempt: int, *, are_checkpoints: bool) -> Source:
    """What the attempt left on the node, of its own files or of its job's checkpoints."""
    return {**outputs_of(job, attempt), "part": "kept", "of": PART if are_checkpoints else ""}


def checkpoints_of(where: Where) -> Source:
    """All that the job wrote, under the names by which it did."""
    return {**where.params(), "part": PART}


def checkpoint_of(where: Where, found: Found) -> Source:
    return {**where.params(), "checkpoint": found.name, "kind": found.kind, "fingerprint": found.fingerprint}


class NodeFiles(NodeCalls):
    # --- any files ---------------------------------------------------------------------------------------------

    async def list_files(self, source: Source) -> Listing:
        files: list[RunFile] = []
        unread, left = b"", _MOST_LIST_BYTES
        async with self._stream(api.list_, **source) as (_, stream):
            pieces = aiter(stream)
            while (piece := await in_time(anext(pieces, None), self.name, _WHAT)) is not None:
                *lines, unread = (unread + piece[1]).split(b"\n")
                left -= len(piece[1])
                if left < 0 or len(unread) > _MOST_LINE_BYTES or len(files) + len(lines) > listing.MOST_FILES:
                    raise self._invalid("more files than allowed")
                files += map(self._parsed, lines)
            answer = await stream.result()
        try:
            unlisted = min(_MOST_UNLISTED, max(0, int(answer["unlisted"])))
            return Listing(tuple(files), unlisted, int(answer["now_ns"]), _cpu_s(answer))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._invalid(f"{error!r:.100}") from error

    async def fetch(self, source: Source, wanted: Sequence[Wanted], writer: Writer) -> None:
        """Raises what the writer raises."""
        reader = resumable.Reader([one.offset for one in wanted], writer)
        files = [[listing.text(one.file.name), one.offset, one.check] for one in wanted]
        thread = Thread("files")
        try:
            async with self._stream(api.send, **source, files=files) as (_, stream):
                pieces = aiter(stream)
                while (piece := await in_time(anext(pieces, None), self.name, _WHAT)) is not None:
                    await thread.do(partial(reader.feed, piece[1]))
                await stream.result()
                reader.finish()
        except StreamError as error:
            raise self._invalid(str(error)) from error
        finally:
            # By the same thread, which may still be writing.
            await thread.do(writer.close)
            thread.close()

    async def hashes(self, source: Source, names: Sequence[bytes]) -> dict[bytes, str | None]:
        """Of whole contents; None for files that cannot be read there (any more)."""
        found: dict[bytes, str | None] = {}
        for part in packed(names, lambda name: name):
            answer = await self._call(api.hashes, _COMPARE_S, **source, names=[listing.text(name) for name in part])
            hashes = answer.get("hashes")
            if not isinstance(hashes, list) or len(hashes) != len(part):
                raise self._invalid("hashes")
            found |= dict(zip(part, (one if isinstance(one, str) else None for one in hashes), strict=True))
        return found

    # --- outputs -----------------------------------------------------------------------------------------------

    async def written(self, runs: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], float]:
        """Those of these runs (job and attempt) that have made any files, and what it cost the node, in seconds."""
        answer = await self._call(api.written, _ANSWER_S, runs=[[str(job), attempt] for job, attempt in runs])
        try:
            places = {int(place) for place in answer["written"]}  # each once
            return [runs[place] for place in sorted(places) if place >= 0], _cpu_s(answer)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise self._invalid(f"{error!r:.100}") from error

    async def keep(self, source: Source, names: Sequence[bytes], *, with_unlisted: bool = False) -> None:
        """Before the run is removed: these files stay on the node, and those that are too many to be listed."""
        if with_unlisted:  # first: they are known by the number of those before them
            await self._call(api.keep, _COMPARE_S, **source, names=[], with_unlisted=True)
        for part in packed(names, lambda name: name):
            await self._call(api.keep, _ANSWER_S, **source, names=[listing.text(name) for name in part])

    async def drop_kept(self, source: Source, names: Sequence[bytes] | None = None) -> None:
        """Deletes files that were kept there: these of an attempt, or those of all attempts at the job."""
        if names is None:
            await self._call(api.drop_kept, _COMPARE_S, **source)
            return
        for part in packed(names, lambda name: name):
            await self._call(api.drop_kept, _ANSWER_S, **source, names=[listing.text(name) for name in part])

    # --- checkpoints -------------------------------------------------------------------------------------------

    async def prepare(self, where: Where, wanted: Found | None) -> Prepared:
        """Creates the folder to write to; says whether the checkpoint to resume from is there."""
        source = checkpoint_of(where, wanted) if wanted else where.params()
        return _decoded(Prepared, await self._call(api.prepare, _ANSWER_S, **source), self.name)

    async def newest(self, where: Where) -> list[Found]:
        """The newest checkpoint that can be sent, preceded by newer ones that cannot."""
        return decode_found(await self._call(api.newest, _ANSWER_S, **where.params()), self.name)

    async def put(self, where: Where, found: Found, folder: Path) -> Prepared:
        """Sends what is in a folder here as the checkpoint to resume from."""
        pieces = received.send_whole(str(folder))
        async with self._stream(api.receive, **checkpoint_of(where, found), size=found.bytes) as (link, stream):
            upload = Upload(link, stream, self.name, _WHAT)
            thread = Thread("files")
            try:
                while upload.is_open and (piece := await thread.do(lambda: next(pieces, None))) is not None:
                    await upload.send(piece)
                await upload.end()
            except (Unsendable, OSError) as error:
                raise UgroError(f"checkpoint {found.name}: {error}", hint=f"it is kept in {folder}") from error
            finally:
                await thread.do(pieces.close)
                thread.close()
            answer = await stream.result()
        return _decoded(Prepared, answer, self.name)

    async def drop_checkpoints(self, where: Where) -> None:
        """Deletes the job's folders there; never one that the user chose."""
        await self._call(api.drop_checkpoints, _ANSWER_S, **where.params())

    def _parsed(self, line: bytes) -> RunFile:
        try:
            return listing.parse(line)
        except ValueError as error:
            raise self._invalid(str(error)) from error

    def _invalid(self, text: str) -> RemoteFailure:
        return _invalid(text, self.name)


def _cpu_s(answer: Mapping[str, Any]) -> float:
    return min(_MOST_CPU_S, max(0.0, float(answer.get("cpu_s") or 0.0)))


def decode_found(answer: Mapping[str, Any], node: str) -> list[Found]:
    """A name never becomes part of a path here, but must still be one that a checkpoint can have."""
    items = answer.get("found")
    if isinstance(items, list) and len(items) > _MOST_FOUND:
        raise _invalid(f"{len(items)} checkpoints", node)
    found = [_decoded(Found, one, node) for one in items] if isinstance(items, list) else []
    for one in found:
        is_valid = (
            checkpoint_names.is_complete(one.name)
            and one.number == checkpoint_names.number(one.name)
            and one.kind in ("file", "folder")
            and 0 <= one.bytes < listing.MOST_BYTES
            and abs(one.changed_ns) < 1 << 63
            and 0 <= one.attempt < _MOST_ATTEMPTS
            and 0 <= one.serial < 1 << 53
            and (one.problem is not None or _is_fingerprint(one.fingerprint))
        )
        if not is_valid:
            raise _invalid(f"{one!r:.200}", node)
    return found


def packed(items: Sequence[T], name_of: Callable[[T], bytes], most: int = 1000) -> Iterator[list[T]]:
    """As many as can be named in one message."""
    part: list[T] = []
    size = 0
    for item in items:
        length = len(json.dumps(listing.text(name_of(item)))) + 200
        if part and (size + length > _MESSAGE_BYTES or len(part) >= most):
            yield part
            part, size = [], 0
        part.append(item)
        size += length
    if part:
        yield part


def _is_fingerprint(text: str) -> bool:
    return len(text) == 32 and set(text) <= set("0123456789abcdef")


def _decoded(cls: type[T], answer: Any, node: str) -> T:
    try:
        return decode(cls, answer)
    except DecodeError as error:
        raise _invalid(str(error), node) from error


def _invalid(text: str, node: str) -> RemoteFailure:
    return RemoteFailure(f"invalid answer about files: {text}", subject=node, cause="damaged")
