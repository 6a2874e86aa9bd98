"""Sends snapshots to nodes, one transfer at a time for each snapshot and node.

If the node has the snapshot, that costs one call. Otherwise only what it lacks is sent, estimated from the snapshot of
the same folder that it had last.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from ugro.kernel.files.code.snapshot_store import SnapshotStore
from ugro.kernel.files.model import SyncReport, SyncTotals, Tidied
from ugro.kernel.files.node_files import Thread, Upload
from ugro.kernel.links.link import Link
from ugro.kernel.links.node import Identity, Node, NodeCalls
from ugro.kernel.store.database import CodeStore
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import RemoteFailure, UgroError
from ugro.kernel.support.quantities import Progress, Speed, format_size
from ugro.node import trees, wire
from ugro.node.files import contents
from ugro.node.files.contents import WINDOW
from ugro.node.files.packs import ContentStore, Lacking
from ugro.node.trees import BLOCK, block, record

# --- file count -------------------------------------------------------------------------------------------------------
# Counts the files of a transfer: a large file is sent in several chunks, and files of equal content share theirs.


class FileCount:
    """The files of a tree of which a node lacks something."""

    def __init__(self, store: ContentStore, root: bytes, lacking: Collection[bytes]) -> None:
        self._waiting: list[int] = []  # for how many chunks, by file
        self._of: dict[bytes, list[int]] = defaultdict(list)  # files, by chunk
        wanted = frozenset(lacking)
        with store.using():
            if root in wanted:
                self._add(store, root, wanted)
            if any(key not in self._of and store.locate(key).kind == trees.CONTENT for key in wanted):
                # An interrupted transfer left trees without their contents: look into all.
                self._waiting, self._of = [], defaultdict(list)
                self._add(store, root, wanted, is_whole=True)

    @property
    def files(self) -> int:
        return len(self._waiting)

    def completed_by(self, keys: Iterable[bytes]) -> int:
        """How many files are complete once these chunks are sent, too."""
        completed = 0
        for key in keys:
            for file in self._of.pop(key, ()):
                self._waiting[file] -= 1
                completed += not self._waiting[file]
        return completed

    def _add(self, store: ContentStore, root: bytes, lacking: frozenset[bytes], *, is_whole: bool = False) -> None:
        todo = [root]
        while todo:
            for entry in store.entries(todo.pop()):
                if entry.kind == trees.FOLDER:
                    # One that the node has is complete there, as a rule.
                    todo += [entry.body] if is_whole or entry.body in lacking else []
                elif entry.kind == trees.FILE and (chunks := lacking.intersection(entry.chunks)):
                    for key in chunks:
                        self._of[key].append(len(self._waiting))
                    self._waiting.append(len(chunks))


# --- contents ---------------------------------------------------------------------------------------------------------
# The code on one node, over its link: whether it is there, what of it is missing, sending that.
#
# Contents are sent in blocks, never more at once than the window of a call, compressed if that is measured to be
# faster.


_ANSWER_S = 30.0
TIDY_S = 600.0
_PUT_BYTES, _MOST_PUT = 64 * 1024, 100
_LEAST_COST = 1 / 100e6  # seconds per byte: compressing cannot be faster
_FIRST_BLOCKS = 5  # only fill the window, and are not measured
_AGAIN_BLOCKS = 32  # then the other way is tried once: contents, or the link, may have changed

T = TypeVar("T")
_Id = bytes


@dataclass(frozen=True, slots=True)
class _Has:
    has: bool


@dataclass(frozen=True, slots=True)
class _Received:
    bad: int
    lacking: tuple[str, ...]


@dataclass(slots=True)
class Sent:
    """How far a transfer is; ``on_change`` is called at every step."""

    files: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    bad: int = 0  # damaged during the transfer and sent again
    on_change: Callable[[], None] = field(default=lambda: None)
    completed_by: Callable[[Sequence[_Id]], int] = len  # files that are complete with these contents

    def add(self, blocks: _Blocks, wire_bytes: int) -> None:
        self.files += self.completed_by(blocks.keys)
        self.bytes += blocks.bytes
        self.wire_bytes += wire_bytes
        self.on_change()


class NodeContents(NodeCalls):
    _has_it, _receive = staticmethod(contents.has), staticmethod(contents.receive)
    what: ClassVar[str] = "the code"
    has_s: ClassVar[float] = _ANSWER_S

    async def has(self, root: str) -> bool:
        """Marks it as used, too: garbage collection deletes the least recently used first."""
        return decoded(_Has, await self._call(self._has_it, self.has_s, root=root)).has

    async def missing(self, ids: Sequence[bytes]) -> list[bytes]:
        """The hashes whose contents are not on the node."""
        async with self._stream(contents.missing) as (link, stream):
            upload = Upload(link, stream, self.name, self.what)
            step = wire.CHUNK // trees.ID_BYTES
            for first in range(0, len(ids), step):
                await upload.send(b"".join(ids[first : first + step]))
            await upload.end()
            answer = await stream.result()
        return [key for key, is_missing in zip(ids, _bits(answer, len(ids)), strict=True) if is_missing]

    async def send(
        self, root: str, ids: Sequence[bytes], store: ContentStore, limit_bytes: int, sent: Sent
    ) -> list[bytes]:
        """Returns what the node still lacks of the tree afterwards."""
        sizes = sum(store.locate(key).size for key in ids)
        if sizes <= _PUT_BYTES and len(ids) <= _MOST_PUT:
            with contextlib.suppress(_Busy):
                return await self._put(root, _Blocks(store, ids), limit_bytes, sent)
        return await self._send_stream(root, ids, store, limit_bytes, sent)

    async def _send_stream(
        self, root: str, ids: Sequence[bytes], store: ContentStore, limit_bytes: int, sent: Sent
    ) -> list[bytes]:
        sizes = sum(store.locate(key).size for key in ids)
        async with self._stream(self._receive, root=root, size=sizes, limit_bytes=limit_bytes) as (link, stream):
            upload = Upload(link, stream, self.name, self.what, WINDOW)
            thread = Thread("code")
            try:
                await self._upload(_Blocks(store, ids), upload, thread, sent)
                await upload.end()
            finally:
                thread.close()
            return _lacking(await stream.result(), sent)

    async def _put(self, root: str, blocks: _Blocks, limit_bytes: int, sent: Sent) -> list[bytes]:
        """In one call: setting up a stream would take longer than the transfer."""
        content = blocks.next() or b""
        about: dict[str, Any] = {"root": root, "size": blocks.bytes, "limit_bytes": limit_bytes}
        try:
            answer = await self._call(contents.put, _ANSWER_S, **about, block=base64.b64encode(content).decode())
        except RemoteFailure as error:
            if error.cause == "busy":
                raise _Busy from error
            raise
        sent.add(blocks, len(content))
        return _lacking(answer, sent)

    async def _upload(self, blocks: _Blocks, upload: Upload, thread: Thread, sent: Sent) -> None:
        began = time.monotonic()
        while upload.is_open and (content := await thread.do(blocks.next)) is not None:
            view = memoryview(content)
            for at in range(0, len(view), wire.CHUNK):
                await upload.send(bytes(view[at : at + wire.CHUNK]))
            sent.add(blocks, len(content))
            blocks.compression.note(time.monotonic() - began, blocks.bytes)
            began = time.monotonic()

    async def tidy(self, limit_bytes: int) -> Tidied:
        return decoded(Tidied, {"node": self.name, **await self._call(contents.tidy, TIDY_S, limit_bytes=limit_bytes)})


class _Busy(Exception):
    """The node would have to wait: the contents are sent as a stream instead."""


class _Blocks:
    """The blocks to send; made in a thread, one at a time."""

    def __init__(self, store: ContentStore, ids: Sequence[bytes]) -> None:
        self.compression = Compression()
        self.keys: list[bytes] = []  # in the last block
        self.bytes = 0
        self._store = store
        # In the order on the disk.
        self._ids = sorted(ids, key=lambda key: store.locate(key)[:2], reverse=True)

    def next(self) -> bytes | None:
        if not self._ids:
            return None
        parts: list[bytes] = []
        self.keys, self.bytes = [], 0
        while self._ids and self.bytes < BLOCK:
            key = self._ids.pop()
            place, content = self._store.locate(key), self._store.read(key)
            parts += record(key, place.kind, content)
            self.keys.append(key)
            self.bytes += place.size
        return block(b"".join(parts), compressed=self.compression.is_compressed)


class Compression:
    """Decides whether to compress, by measuring the time per byte both ways during the transfer."""

    def __init__(self) -> None:
        self.is_compressed = False
        self._costs: dict[bool, float] = {}  # seconds per byte
        self._blocks = 0

    def note(self, seconds: float, size: int) -> None:
        cost = seconds / max(1, size)
        old = self._costs.get(self.is_compressed, cost)
        self._costs[self.is_compressed] = 0.5 * (old + cost)
        self._blocks += 1
        if len(self._costs) < 2:
            # Not tried if the link is faster than compressing can be.
            self.is_compressed = cost > _LEAST_COST and self._blocks > _FIRST_BLOCKS
        else:
            better = self._costs[True] < self._costs[False]
            self.is_compressed = better if self._blocks % _AGAIN_BLOCKS else not better


def _bits(answer: dict[str, Any], count: int) -> list[bool]:
    try:
        bits = base64.b64decode(str(answer.get("missing")), validate=True)
    except binascii.Error:
        bits = b""
    if len(bits) != -(-count // 8):
        raise RemoteFailure("invalid answer about contents", cause="damaged")
    return [bool(bits[at >> 3] >> (at & 7) & 1) for at in range(count)]


def _lacking(answer: dict[str, Any], sent: Sent) -> list[bytes]:
    received = decoded(_Received, answer)
    sent.bad += received.bad
    try:
        return [trees.parse_id(text) for text in received.lacking]
    except ValueError as error:
        raise RemoteFailure(f"invalid answer about contents: {error}", cause="damaged") from error


def decoded(cls: type[T], answer: Any) -> T:
    try:
        return decode(cls, answer)
    except DecodeError as error:
        raise RemoteFailure(f"invalid answer about contents: {error}", cause="damaged") from error


# --- transfer ---------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_ROUNDS = 4
IS_THERE = "already there"
# So little is sent without asking first which of it is missing: that would take as long.
_UNASKED_BYTES = 32 * 1024
_UNASKED = 50

Key = tuple[str, str]  # node and tree


@dataclass(slots=True)
class CodeTransfer:
    """One that is under way."""

    task: asyncio.Task[None]
    sent: Sent = field(default_factory=Sent)
    files: int = 0
    bytes: int = 0
    why: str = ""
    waiting: int = 0
    began: float = field(default_factory=time.monotonic)
    speed: Speed | None = None  # since the first byte

    @property
    def progress(self) -> Progress:
        rate = self.speed.at(time.monotonic()) if self.speed else None
        return Progress(self.sent.bytes, self.bytes, self.sent.files, self.files, rate)

    def report(self, node: str) -> SyncReport:
        return SyncReport(
            node, "sending" if self.bytes else "checking", self.why, self.files, self.bytes,
            self.sent.bytes, self.sent.wire_bytes, time.monotonic() - self.began,
            sent_files=self.sent.files, bytes_per_s=self.progress.bytes_per_s,
        )  # fmt: skip


class SharedLock:
    """Held by many at once, or by one exclusively."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._is_closed = False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed)
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def exclusive(self, *, is_patient: bool = False) -> AsyncIterator[None]:
        """``is_patient``: waits until nobody holds it, and does not keep others from taking it meanwhile."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_closed and not (is_patient and self._inside))
            self._is_closed = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._inside)
            yield
        finally:
            self._is_closed = False
            async with self._changed:
                self._changed.notify_all()


class CodeTransfers:
    what = "code"

    def __init__(
        self, snapshots: SnapshotStore, records: CodeStore, node: Callable[[str], Node], identity: Identity
    ) -> None:
        self._snapshots = snapshots
        self._records = records
        self._node = node
        self._identity = identity
        self._there: dict[Key, Link] = {}  # the link over which we learnt that the node has it
        self._transfers: dict[Key, CodeTransfer] = {}
        self._folders: dict[str, str] = {}  # by tree
        self._last: dict[tuple[str, str], str] = {}  # tree, by node and folder
        self._writing: set[asyncio.Task[None]] = set()
        self.moved: dict[Key, float] = {}  # when a transfer under way last made progress, by the monotonic clock
        self.own: set[str] = set()  # trees with files of ours: no user's code is like them
        self.lock = SharedLock()
        self._slots = asyncio.Semaphore(5)
        self._slot_count = 5
        self.store_limit = 10_000_000_000
        self.totals = SyncTotals()
        self.on_sync: Callable[[float], None] = lambda seconds: None

    def allow(self, max_parallel: int, store_limit: int) -> None:
        self.store_limit = store_limit
        if max_parallel != self._slot_count:
            self._slots, self._slot_count = asyncio.Semaphore(max_parallel), max_parallel

    def contents(self, node: str) -> NodeContents:
        return NodeContents(self._node(node), self._identity, _CONNECT_S)

    async def ensure(self, node: str, root: str) -> SyncReport:
        """When this returns, the node has the snapshot. May be cancelled."""
        key = (node, root)
        if (link := self._node(node).link) is not None and self._there.get(key) is link:
            return SyncReport(node, "done", IS_THERE)
        transfer = self._transfers.get(key)
        if transfer is None:
            task = asyncio.create_task(self._bring(node, root), name=f"{self.what} {root[:12]} to {node}")
            transfer = self._transfers[key] = CodeTransfer(task)
            task.add_done_callback(lambda _: self._transfers.pop(key, None))
        transfer.waiting += 1
        try:
            await asyncio.shield(transfer.task)
            return replace(transfer.report(node), state="done")
        finally:
            transfer.waiting -= 1
            if not transfer.waiting and not transfer.task.done():
                transfer.task.cancel()

    async def look_again(self, node: str, root: str) -> None:
        """Checks that the node still has it: somebody may have cleaned up."""
        if (node, root) in self._there and not await self.contents(node).has(root):
            self.forget(node, root)

    def note_folder(self, root: str, folder: str) -> None:
        """Records the folder of a snapshot: an earlier one of the same folder is most like it."""
        if self._folders.get(root) != folder:
            self._folders[root] = folder
            self._record(self._records.taken(folder, root))

    async def last(self, node: str, folder: str) -> str | None:
        """The last snapshot of a folder, or of any, that the node had."""
        return self._last.get((node, folder)) or await self._records.last(node, folder)

    async def _folder_of(self, root: str) -> str:
        if root not in self._folders:
            self._folders[root] = await self._records.folder_of(root)
        return self._folders[root]

    def _record(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_tried(work), name="record where code is")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    def forget(self, node: str, root: str) -> None:
        """The node no longer has it."""
        self._there.pop((node, root), None)

    def transfer(self, node: str, root: str) -> CodeTransfer | None:
        return self._transfers.get((node, root))

    async def close(self) -> None:
        tasks = [transfer.task for transfer in self._transfers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._writing, return_exceptions=True)

    async def lacking(self, node: str, root: str) -> tuple[list[bytes], str]:
        """What would have to be sent, and why; nothing if the node has all of it."""
        there = self.contents(node)
        if await there.has(root):
            return [], IS_THERE
        base = await self.last(node, await self._folder_of(root))
        ids = await asyncio.to_thread(self._snapshots.candidates, root, base)
        why = f"differs from {base[:12]}, which the node had last" if base else "new on this node"
        if len(ids) > _UNASKED or sum(self._snapshots.store.locate(key).size for key in ids) > _UNASKED_BYTES:
            ids = await there.missing(ids)
        return ids, why

    async def _bring(self, node: str, root: str) -> None:
        transfer = self._transfers[node, root]
        link = await self._node(node).ready(_CONNECT_S, patiently=True)
        try:
            async with self.lock.shared():
                await self._send(node, root, transfer)
        except Lacking as error:
            self._count(transfer, failed=1)
            text = f"some of the {self.what} {root[:12]} is no longer stored here"
            raise UgroError(text, hint="submit the job again") from error
        except UgroError:
            self._count(transfer, failed=1)
            raise
        self._there[node, root] = link
        self.moved.pop((node, root), None)
        if root not in self.own:
            folder = await self._folder_of(root)
            self._last[node, folder] = root
            self._record(self._records.sent(node, folder, root))
        self._count(transfer, unchanged=int(transfer.bytes == 0))
        self._log(node, root, transfer)

    async def _send(self, node: str, root: str, transfer: CodeTransfer) -> None:
        ids, transfer.why = await self.lacking(node, root)
        if transfer.why == IS_THERE:
            return
        async with self._slots:
            for _ in range(_ROUNDS):
                store = self._snapshots.store
                await self._measure((node, root), ids, transfer)
                lacking = await self.contents(node).send(root, ids, store, self.store_limit, transfer.sent)
                if not lacking:
                    return
                # It had less than expected, or some were damaged during the transfer.
                everything = await asyncio.to_thread(self._snapshots.candidates, root, None)
                ids = await self.contents(node).missing(everything)
        raise RemoteFailure("the code was damaged in every transfer", subject=node, cause="damaged")

    async def _measure(self, key: Key, ids: list[bytes], transfer: CodeTransfer) -> None:
        """Adds what is sent now to what there is to send."""
        store = self._snapshots.store
        count = await asyncio.to_thread(FileCount, store, trees.parse_id(key[1]), ids)
        transfer.files += count.files
        transfer.bytes += sum(store.locate(one).size for one in ids)
        speed = transfer.speed = transfer.speed or Speed(time.monotonic())
        transfer.sent.completed_by = count.completed_by

        def moved() -> None:
            self.moved[key] = time.monotonic()
            speed.note(self.moved[key], transfer.sent.bytes)

        transfer.sent.on_change = moved

    def _count(self, transfer: CodeTransfer, unchanged: int = 0, failed: int = 0) -> None:
        old, sent = self.totals, transfer.sent
        seconds = time.monotonic() - transfer.began
        self.on_sync(seconds)
        self.totals = replace(
            old,
            syncs=old.syncs + 1,
            unchanged=old.unchanged + unchanged,
            failed=old.failed + failed,
            duration_seconds=old.duration_seconds + seconds,
            files=old.files + sent.files,
            bytes=old.bytes + sent.bytes,
            wire_bytes=old.wire_bytes + sent.wire_bytes,
        )

    def _log(self, node: str, root: str, transfer: CodeTransfer) -> None:
        sent = transfer.sent
        log.info(
            "sent %s %s: %d files of %s as %s in %.3f s, %d contents sent again: %s",
            self.what, root[:12], sent.files, format_size(sent.bytes), format_size(sent.wire_bytes),
            time.monotonic() - transfer.began, sent.bad, transfer.why, extra={"node": node},
        )  # fmt: skip


async def _tried(work: Coroutine[Any, Any, None]) -> None:
    """If it is lost, that costs one more call; a state that takes no changes is reported by others."""
    with suppress(UgroError):
        await work
