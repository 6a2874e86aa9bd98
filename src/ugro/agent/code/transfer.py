"""Sends snapshots to nodes, one transfer at a time for each snapshot and node.

If the node has the snapshot, that costs one call. Otherwise only what it lacks is sent, estimated from the snapshot of
the same folder that it had last.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ugro.agent.code.file_count import FileCount
from ugro.agent.code.snapshot_store import SnapshotStore
from ugro.core.code import SyncReport, SyncTotals
from ugro.core.errors import RemoteFailure, UgroError
from ugro.core.support.progress import Progress, Speed
from ugro.core.support.quantity import format_size
from ugro.nodes.contents import NodeContents, Sent
from ugro.nodes.link import Link
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity
from ugro.remote import trees
from ugro.remote.cas.packs import Lacking
from ugro.store.code import CodeStore

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
