"""The folders of jobs on one node, over its link: whether one is there, sending it, cleaning up."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ugro.features.remote_access.service import Limit, Uploads, as_sent
from ugro.kernel.access.caller import expect_files, is_vouched
from ugro.kernel.files.client_files import FOLDER, Offer, remote_client
from ugro.kernel.files.code.snapshot_store import (
    Reading,
    SnapshotRequest,
    SnapshotStore,
    StoredSnapshot,
    folder_request,
)
from ugro.kernel.files.code.transfer import IS_THERE, TIDY_S, CodeTransfer, CodeTransfers, NodeContents, Sent, decoded
from ugro.kernel.files.model import Tidied
from ugro.kernel.jobs.model import Folder, Job
from ugro.kernel.jobs.operations import FolderRead, FolderReading
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity
from ugro.kernel.store.database import CodeStore
from ugro.kernel.support.errors import NotFound, RemoteFailure, UgroError, UsageError
from ugro.kernel.support.quantities import together
from ugro.node import machine as disk
from ugro.node import trees
from ugro.node.files import folders_api
from ugro.node.files.folders import Layout
from ugro.node.files.packs import ContentStore
from ugro.node.program import Refused

_HAS_S = 120.0  # it looks at every file


class NodeFolders(NodeContents):
    _has_it, _receive = staticmethod(folders_api.has), staticmethod(folders_api.receive)
    what = "the folder"
    has_s = _HAS_S

    async def send(
        self, root: str, ids: Sequence[bytes], store: ContentStore, limit_bytes: int, sent: Sent
    ) -> list[bytes]:
        """Returns what the node still lacks afterwards; some of it, if that is very much."""
        return await self._send_stream(root, ids, store, limit_bytes, sent)

    async def tidy_folders(self, limit_bytes: int, keep: Sequence[str]) -> Tidied:
        """``keep``: the trees that stay regardless of the limit, besides those that runs use."""
        answer = await self._call(folders_api.tidy, TIDY_S, limit_bytes=limit_bytes, keep=list(keep))
        return decoded(Tidied, {"node": self.name, **answer})


# --- sending folders to nodes -----------------------------------------------------------------------------------------
# Each folder is sent once, straight into its files there. The node says what it lacks, again and again.


_CONNECT_S = 3.0
_MOST_SAME = 4  # rounds in which nothing new arrives


class FolderTransfers(CodeTransfers):
    what = "folder"

    def contents(self, node: str) -> NodeFolders:
        return NodeFolders(self._node(node), self._identity, _CONNECT_S)

    async def ensure_all(self, node: str, roots: list[str]) -> int:
        """The bytes that had to be sent."""
        self.own.update(roots)  # none of it is code that another folder's may be like
        return sum([(await self.ensure(node, root)).sent_bytes for root in roots])

    async def _send(self, node: str, root: str, transfer: CodeTransfer) -> None:
        there = self.contents(node)
        if await there.has(root):
            transfer.why = IS_THERE
            return
        transfer.why = "new on this node"
        ids = await asyncio.to_thread(self._trees, root)
        async with self._slots:
            await self._send_rounds(there, root, ids, transfer)

    async def _send_rounds(self, there: NodeFolders, root: str, ids: list[bytes], transfer: CodeTransfer) -> None:
        """First the trees, then what the node says that it lacks of their contents."""
        same = 0
        while ids:
            await self._measure((there.name, root), ids, transfer)
            lacking = await there.send(root, ids, self._snapshots.store, 0, transfer.sent)
            same = same + 1 if lacking == ids else 0
            if same == _MOST_SAME:
                raise RemoteFailure("the folder was damaged in every transfer", subject=there.name, cause="damaged")
            ids = lacking

    def _trees(self, root: str) -> list[bytes]:
        store = self._snapshots.store
        with store.using():
            if not self._snapshots.has(root):
                hint = "submit the job again: ugro retry keeps the folder as it was, and that is gone"
                raise NotFound(f"the folder {root[:12]} is no longer kept here", hint=hint)
            return list(dict.fromkeys(Layout(trees.parse_id(root), store.entries).trees))


# --- the folders that jobs name ---------------------------------------------------------------------------------------
# They are stored here when a job is submitted, and sent to its nodes before it starts there. They have a store, a limit
# and transfers of their own: a model of 13 GB pushes no code out, and code that is submitted meanwhile does not wait
# until it was read.


log = logging.getLogger(__name__)

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
        if (offer := remote_client()) is not None and not is_vouched(path):
            return await asyncio.to_thread(self._offered, offer, name, str(path))
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

    def _offered(self, offer: Offer, name: str, path: str) -> Folder:
        """As a client on another machine has sent it."""
        key = f"{name}={path}"  # a client may name one folder twice
        params = {"name": name, "folder": path, "max_bytes": self.cluster.config.sync.folder_limit}
        found = as_sent(Folder, offer.folder(key, params))
        if not self.uploads.has(found.tree):  # it was removed since
            offer.forget(FOLDER, key)
            return self._offered(offer, name, path)
        return found

    @property
    def uploads(self) -> Uploads:
        """For clients on other machines."""
        limit = Limit(self.cluster.config.sync.folder_limit, "sync.folder_limit")
        return Uploads(self._snapshots, self._transfers.lock.shared, limit, lambda: self._soon(self._make_room()))

    def _request(self, name: str, path: Path, reading: Reading) -> SnapshotRequest:
        reading.expect_room = self._expect_room
        return folder_request(name, path, self.cluster.config.sync.folder_limit, reading)

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


def _nodes(job: Job) -> tuple[str, ...]:
    return job.placement.nodes if job.placement else ()


async def read_slowly(folders: Folders, name: str, path: Path) -> AsyncGenerator[FolderReading | FolderRead]:
    """Says how far it is while it reads; then the folder."""
    reading = Reading()
    taking = asyncio.ensure_future(folders.take(name, path, reading))
    try:
        while not (await asyncio.wait([taking], timeout=_LOOK_S))[0]:
            yield FolderReading(str(path), reading.bytes, reading.total)
        yield FolderRead(await taking)
    finally:
        reading.is_cancelled = True
        taking.cancel()
