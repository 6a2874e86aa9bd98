"""The folders that jobs name: stored here when a job is submitted, sent to its nodes before it starts there.

They have a store, a limit and transfers of their own: a model of 13 GB pushes no code out, and code that is submitted
meanwhile does not wait until it was read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ugro.agent.code.folder_transfer import FolderTransfers
from ugro.agent.code.scanner import Choices, Links
from ugro.agent.code.snapshot_store import Reading, SnapshotRequest, SnapshotStore, StoredSnapshot
from ugro.agent.support.caller import expect_files
from ugro.agent.tracking.cluster import Cluster
from ugro.core.code import Tidied
from ugro.core.errors import UgroError, UsageError
from ugro.core.folder import Folder
from ugro.core.job import Job
from ugro.core.support.progress import together
from ugro.nodes.runs import Identity
from ugro.remote import disk
from ugro.remote.program import Refused
from ugro.store.code import CodeStore

log = logging.getLogger(__name__)

_LINK_HINT = "put the file itself there instead of the link, or name the folder that the link leads to"
_MOST_NAMED = 2  # nodes in a sentence
_LOOK_S = 0.3

Needed = Callable[[], Awaitable[list[str]]]  # the trees of jobs that have not ended


@dataclass(slots=True)
class Folders:
    folder: Path
    cluster: Cluster
    records: CodeStore
    identity: Identity
    needed: Needed
    _snapshots: SnapshotStore = field(init=False)
    _transfers: FolderTransfers = field(init=False)
    _making_room: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._snapshots = SnapshotStore(self.folder)
        inventory = self.cluster.inventory
        self._transfers = FolderTransfers(self._snapshots, self.records, inventory.get, self.identity)

    # --- taking ------------------------------------------------------------------------------------------------

    async def take(self, name: str, path: Path, reading: Reading | None = None) -> Folder:
        """Stores it as it is now. Files that were read before and look the same are not read again."""
        path = Path(os.path.abspath(path))
        expect_files(path)
        request = await asyncio.to_thread(self._request, name, path, reading or Reading())
        taken = await asyncio.to_thread(self._take, request)
        if taken.skipped:
            raise UsageError(f"folder {name}: {taken.skipped[0]}", hint="remove it there, or name another folder")
        if taken.new_bytes:
            self._soon(self._make_room())
        only = request.choices.only
        return Folder(name, str(path), taken.id, os.fsdecode(only) if only else "", taken.files, taken.bytes)

    def _request(self, name: str, path: Path, reading: Reading) -> SnapshotRequest:
        kind = _kind_of(name, path)
        is_file = stat.S_ISREG(kind)
        reading.expect_room = self._expect_room
        choices = Choices(
            follows_links=is_file or _is_hub_snapshot(path),
            links_out=Links.ERROR,
            link_hint=_LINK_HINT,
            reads_rules=False,
            only=os.fsencode(path.name) if is_file else None,
        )
        limit = self.cluster.config.sync.folder_limit
        folder = path.parent if is_file else path
        return SnapshotRequest(str(folder), choices, limit, is_code=False, reading=reading)

    def _take(self, request: SnapshotRequest) -> StoredSnapshot:
        taken = self._snapshots.take(request)
        self._snapshots.settle()
        return taken

    def _expect_room(self, size: int) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (text := disk.shortage(str(self.folder), size, "a copy of the folder")) is not None:
            raise UgroError(text, hint="make room there, or free some: ugro node gc")

    # --- sending -----------------------------------------------------------------------------------------------

    def has(self, folders: Iterable[Folder]) -> bool:
        """Whether a job with these could be started again."""
        return all(self._snapshots.has(folder.tree) for folder in folders)

    async def bring(self, folders: Sequence[Folder], nodes: Iterable[str]) -> None:
        if not folders:
            return
        sync = self.cluster.config.sync
        self._transfers.allow(sync.max_parallel_transfers, sync.folder_limit)
        trees = list(dict.fromkeys(folder.tree for folder in folders))
        names = list(nodes)
        outcomes = await asyncio.gather(
            *(self._transfers.ensure_all(node, trees) for node in names), return_exceptions=True
        )
        for node, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome:
                self._soon(self._tidy_node(node))

    def forget(self, folders: Iterable[Folder], node: str) -> None:
        """The node may lack them: they are looked for before the next start there."""
        for folder in folders:
            self._transfers.forget(node, folder.tree)

    def moved_at(self, job: Job) -> float:
        """When a transfer last made progress, by the monotonic clock; 0 if there is none."""
        moved = self._transfers.moved
        return max((moved.get((node, one.tree), 0.0) for node in _nodes(job) for one in job.spec.folders), default=0.0)

    def progress(self, job: Job) -> str | None:
        """A sentence, while one is being sent."""
        for folder in job.spec.folders:
            going = {node: self._transfers.transfer(node, folder.tree) for node in _nodes(job)}
            found = {node: one.progress for node, one in going.items() if one is not None and one.bytes}
            if found:
                nodes = ", ".join(found) if len(found) <= _MOST_NAMED else f"{len(found)} nodes"
                return f"sending folder {folder.name} to {nodes}: {together(found.values())}"
        return None

    # --- making room -------------------------------------------------------------------------------------------

    async def tidy(self, nodes: Sequence[str], *, everything: bool) -> list[Tidied]:
        """On the nodes and on this machine."""
        limit = 0 if everything else self.cluster.config.sync.folder_limit
        there = await asyncio.gather(*(self._tidied(node, limit) for node in nodes))
        return [*there, await self._tidy_home(limit)]

    async def _tidied(self, node: str, limit: int) -> Tidied:
        try:
            return await self._transfers.contents(node).tidy_folders(limit, await self.needed())
        except UgroError as error:
            return Tidied(node, error=error.message)

    async def _tidy_node(self, node: str) -> None:
        done = await self._tidied(node, self.cluster.config.sync.folder_limit)
        if done.error or done.freed_bytes:
            log.info("removed folders: %s", done.error or f"{done.freed_bytes} bytes", extra={"node": node})

    async def _make_room(self) -> None:
        limit = self.cluster.config.sync.folder_limit
        try:
            if await asyncio.to_thread(self._snapshots.size_bytes) > limit:
                await self._tidy_home(limit)
        except (UgroError, Refused, OSError) as error:
            log.warning("the store of folders cannot be cleaned up: %s", error)

    async def _tidy_home(self, limit: int) -> Tidied:
        if not self.folder.is_dir():
            return Tidied(None)
        async with self._transfers.lock.exclusive(is_patient=True):
            done = await asyncio.to_thread(self._snapshots.tidy, limit, await self.needed())
        return Tidied(None, done.freed_bytes, done.kept_bytes, done.roots)

    def _soon(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._making_room.add(task)
        task.add_done_callback(self._making_room.discard)

    def end(self) -> None:
        """Takes no more."""
        self._snapshots.end()

    async def close(self) -> None:
        for task in self._making_room:
            task.cancel()
        await asyncio.gather(*self._making_room, return_exceptions=True)
        await self._transfers.close()


def _kind_of(name: str, path: Path) -> int:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"folder {name}: {path}: {why}", hint="name a folder or a file on this machine") from error
    kind = stat.S_IFMT(mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise UsageError(f"folder {name}: {path} is neither a folder nor a file", hint="name a folder or a file")
    return kind


def _is_hub_snapshot(path: Path) -> bool:
    """In a cache of Hugging Face: its files are links to those that all revisions share."""
    return path.parent.name == "snapshots" and (path.parent.parent / "blobs").is_dir()


def _nodes(job: Job) -> tuple[str, ...]:
    return job.placement.nodes if job.placement else ()


async def read_slowly(folders: Folders, name: str, path: Path) -> AsyncGenerator[dict[str, Any]]:
    """Says how far it is while it reads; then the folder."""
    reading = Reading()
    taking = asyncio.ensure_future(folders.take(name, path, reading))
    try:
        while not (await asyncio.wait([taking], timeout=_LOOK_S))[0]:
            yield {"reading": str(path), "bytes": reading.bytes, "total": reading.total}
        yield {"folder": await taking}
    finally:
        reading.is_cancelled = True
        taking.cancel()
