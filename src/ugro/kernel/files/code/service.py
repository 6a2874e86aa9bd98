"""The code of jobs: a snapshot of a folder when a job is submitted, sent to its nodes before it starts there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import logging
import os
import zipfile
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import ugro
from ugro.features.environments.service.installed import ScriptImports
from ugro.features.remote_access.service import Limit, Uploads, as_sent
from ugro.kernel.access.caller import expect_files
from ugro.kernel.files.client_files import CODE, Offer, Offers, remote_client
from ugro.kernel.files.code.diff import CodeDiff, code_diff, preview
from ugro.kernel.files.code.folders import Folders
from ugro.kernel.files.code.gitignore import FILES, IgnoreRules
from ugro.kernel.files.code.scanner import Choices, Links
from ugro.kernel.files.code.snapshot_store import EMPTY, SnapshotRequest, SnapshotStore, StoredSnapshot
from ugro.kernel.files.code.transfer import CodeTransfers
from ugro.kernel.files.model import Snapshot, SyncReport, SyncTotals, Tidied, both
from ugro.kernel.files.rules import NamedBy
from ugro.kernel.jobs.model import FINAL_STATES, Imports, Job, JobSpec, JobState
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.quantities import together
from ugro.kernel.support.state_dir import StateDir
from ugro.node import trees
from ugro.node.files.packs import ContentStore, Lacking
from ugro.node.files.workdir import FILE
from ugro.node.program import Refused
from ugro.node.trees import TreeEntry

# --- which results the ignore files name ------------------------------------------------------------------------------
# What the ignore files of a job's code, and the configuration, say about the files that the job makes.
#
# The ignore files are those that were sent: what is edited here later, or what the job writes on the node, has no say.
# Rules of folders above the one that was sent do not apply: then a file is rather collected than not.


_Folder = tuple[IgnoreRules, dict[bytes, TreeEntry]]


class ResultRules:
    """Of one tree of code. Not async: call it in a thread."""

    def __init__(self, store: SnapshotStore, root: str | None, patterns: Iterable[str]) -> None:
        self._store = store.store
        self._top = IgnoreRules.of(patterns, b"")
        self._root = trees.parse_id(root) if root is not None and store.has(root) else None
        self._folders: dict[bytes, _Folder] = {}
        self._named: dict[bytes, str | None] = {b"": None}

    def named_by(self, name: bytes) -> str | None:
        """Whose rule ignores a file, or a folder that it is in."""
        folder, _, last = name.rpartition(b"/")
        source = self._folder_named_by(folder)
        if source is None:
            source = self._rules(folder)[0].named_by(_prefix(folder), last, is_folder=False)
        return source

    def _folder_named_by(self, folder: bytes) -> str | None:
        if folder not in self._named:
            above, _, last = folder.rpartition(b"/")
            source = self._folder_named_by(above)
            if source is None:
                source = self._rules(above)[0].named_by(_prefix(above), last, is_folder=True)
            self._named[folder] = source
        return self._named[folder]

    def _rules(self, folder: bytes) -> _Folder:
        """Those that apply in a folder, and what is in it of the code."""
        if folder not in self._folders:
            self._folders[folder] = self._read(folder)
        return self._folders[folder]

    def _read(self, folder: bytes) -> _Folder:
        rules, tree = self._top, self._root
        if folder:
            above, _, last = folder.rpartition(b"/")
            rules, entries = self._rules(above)
            entry = entries.get(last)
            tree = entry.body if entry is not None and entry.kind == trees.FOLDER else None
        entries = _entries(self._store, tree)
        for name in FILES:
            if (file := entries.get(name)) is not None and file.kind == trees.FILE:
                with contextlib.suppress(OSError):  # too many patterns: code that was scanned here has no such file
                    rules = rules.with_rules(name, _content(self._store, file), _prefix(folder))
        return rules, entries


def _prefix(folder: bytes) -> bytes:
    return folder + b"/" if folder else b""


def _entries(store: ContentStore, tree: bytes | None) -> dict[bytes, TreeEntry]:
    """None of a tree that is no longer kept here."""
    if tree is None:
        return {}
    try:
        with store.using():
            return {entry.name: entry for entry in store.entries(tree)}
    except Lacking:
        return {}


def _content(store: ContentStore, file: TreeEntry) -> bytes:
    try:
        with store.using():
            return b"".join(store.read(chunk) for chunk in file.chunks)
    except Lacking:
        return b""


# --- UGRO's own package -----------------------------------------------------------------------------------------------
# UGRO's own package as it is sent to nodes: one zip that Python imports from, a tree in the content store.
#
# All of it that is Python: a script that imports more than ``ugro.train`` gets one version of everything, not a mix
# with what a node has installed. The same files are the same bytes, so a node gets it once.


_MIDNIGHT = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip knows
_MODE = 0o600


class Sdk:
    def __init__(self, snapshots: SnapshotStore) -> None:
        self._snapshots = snapshots
        self.tree: str | None = None  # its hash, once it is known

    def stored(self) -> str:
        """The hash of its tree, which is in the store when this returns. Blocks."""
        if self.tree is None or not self._snapshots.has(self.tree):
            self.tree = self._store()
        return self.tree

    def _store(self) -> str:
        try:
            content = package()
        except OSError as error:
            text = f"UGRO's own files cannot be read: {error}"
            raise UgroError(text, hint="was UGRO removed or upgraded? Then: ugro agent restart") from error
        return self._snapshots.keep_file(FILE, content, _MODE)


@functools.cache
def package() -> bytes:
    """Read once: it stays what this agent is, whatever is installed while it runs."""
    root = Path(ugro.__file__).parent
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(root.rglob("*.py")):
            about = zipfile.ZipInfo(path.relative_to(root.parent).as_posix(), _MIDNIGHT)
            about.compress_type = zipfile.ZIP_DEFLATED
            about.create_system = 3  # Unix, wherever it is made
            archive.writestr(about, path.read_bytes())
    return found.getvalue()


# --- the code of jobs -------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_LOOK_S = 0.2
_MOST_NAMED = 2  # nodes in a sentence
_LIVE = frozenset(JobState) - FINAL_STATES


class Code:
    def __init__(self, state: StateDir, store: Store, cluster: Cluster, identity: Identity) -> None:
        self._state = state
        self._store = store
        self._cluster = cluster
        self._snapshots = SnapshotStore(state.contents)
        self._transfers = CodeTransfers(self._snapshots, store.code, cluster.inventory.get, identity)
        self._imports = ScriptImports(self._snapshots)
        self._sdk = Sdk(self._snapshots)
        self.folders = Folders(state.folders, cluster, store.code, identity, self._live_folders)
        self.offers = Offers()  # of clients on other machines
        self._making_room: asyncio.Task[None] | None = None

    # --- taking ------------------------------------------------------------------------------------------------

    async def take(
        self, folder: Path, *, force: bool = False, is_lasting: bool = True, without: Iterable[Path] = ()
    ) -> Snapshot:
        """Stores the folder as it is now; ``is_lasting``: so that it survives a power cut. ``without`` is left out."""
        if (offer := remote_client()) is not None:
            sent = await asyncio.to_thread(self._offered, offer, folder, force, [str(one) for one in without])
            self._make_room_soon()
            self._transfers.note_folder(sent.id, sent.folder)
            return sent
        expect_files(folder)
        taken = await asyncio.to_thread(self._take, self._request(folder, force, without), is_lasting)
        self._count(taken)
        if taken.new_bytes:
            self._make_room_soon()
        self._transfers.note_folder(taken.id, taken.folder)
        return Snapshot(taken.id, taken.folder, taken.files, taken.bytes, taken.skipped)

    def _offered(self, offer: Offer, folder: Path, force: bool, without: list[str]) -> Snapshot:
        """As a client on another machine has sent it: by the rules of this cluster, but from its own disk."""
        sync = self._cluster.config.sync
        params = {
            "exclude": list(sync.exclude_patterns),
            "follows_links": sync.follow_symlinks,
            "links_out": str(sync.outside_links),
            "max_bytes": sync.max_size,
            "trusts_times": not sync.use_checksums,
            "force": force,
            "without": without,
        }
        found = as_sent(Snapshot, offer.code(str(folder), params))
        if found.id == EMPTY or self.uploads.has(found.id):
            return found
        offer.forget(CODE, str(folder))  # it was removed since
        return self._offered(offer, folder, force, without)

    @property
    def uploads(self) -> Uploads:
        """For clients on other machines."""
        sync = self._cluster.config.sync  # with --force, code may be larger than max_size
        limit = Limit(max(sync.max_size, sync.store_limit), "sync.store_limit")
        return Uploads(self._snapshots, self._transfers.lock.shared, limit, self._make_room_soon)

    async def take_files(self, folder: Path) -> str:
        """Stores a folder of our own, every file of it; the hash of its tree."""
        request = SnapshotRequest(str(folder), Choices(), 0, is_forced=True)
        taken = await asyncio.to_thread(self._take, request, False)
        self._transfers.own.add(taken.id)
        if taken.new_bytes:
            self._make_room_soon()
        return taken.id

    async def with_files(self, snapshot: str | None, files: Mapping[bytes, Path]) -> str:
        """Stores a snapshot with these files added, which are not in it; the hash of its tree."""
        async with self._transfers.lock.shared():  # nothing is deleted meanwhile
            tree = await to_the_end(partial(self._snapshots.with_files, snapshot, files))
        self._make_room_soon()
        return tree

    async def keep_files(self, folder: Path) -> str:
        """The same for gigabytes, which are read but once: code is stored and sent meanwhile."""
        async with self._transfers.lock.shared():  # nothing is deleted meanwhile
            tree = await to_the_end(partial(self._snapshots.keep_files, folder))
        self._transfers.own.add(tree)
        self._make_room_soon()
        return tree

    def _take(self, request: SnapshotRequest, is_lasting: bool) -> StoredSnapshot:
        taken = self._snapshots.take(request)
        if is_lasting:
            self._snapshots.settle()
        return taken

    def result_rules(self, root: str | None) -> NamedBy:
        """Who says that a file which a job with this code makes is not to be sent."""
        rules = ResultRules(self._snapshots, root, self._cluster.config.sync.exclude_patterns)
        return rules.named_by

    def why_left_alone(self, folder: Path) -> str | None:
        """What a folder is that nobody who runs a command there means to send as a whole; None for all others."""
        if (offer := remote_client()) is not None:
            return offer.why_left_alone(str(folder))
        for place, what in ((Path.home(), "your home folder"), (Path("/"), "/"), (self._state.path, "UGRO's own")):
            with contextlib.suppress(OSError):
                if os.path.samefile(folder, place):
                    return what
        return None

    def _request(self, folder: Path, force: bool, without: Iterable[Path]) -> SnapshotRequest:
        sync = self._cluster.config.sync
        left_out = [os.stat(path) for path in (self._state.path, *without) if path.exists()]
        choices = Choices(
            sync.exclude_patterns,
            sync.follow_symlinks,
            Links(sync.outside_links),
            frozenset((one.st_dev, one.st_ino) for one in left_out),
        )
        return SnapshotRequest(str(folder), choices, sync.max_size, force, trusts_times=not sync.use_checksums)

    def _count(self, taken: StoredSnapshot) -> None:
        old = self._transfers.totals
        self._transfers.totals = replace(
            old,
            snapshots=old.snapshots + 1,
            snapshot_seconds=old.snapshot_seconds + taken.seconds,
            snapshot_files_read=old.snapshot_files_read + taken.new_files,
        )

    def _make_room_soon(self) -> None:
        """In the background, after transfers that are under way: submitting a job does not wait for it."""
        if self._making_room is None or self._making_room.done():
            self._making_room = asyncio.create_task(self._make_room(), name="make room for code")

    async def _make_room(self) -> None:
        limit = self._cluster.config.sync.store_limit
        try:
            if await asyncio.to_thread(self._snapshots.size_bytes) > limit:
                await self._tidy_home(limit, is_patient=True)
        except (UgroError, Refused, OSError) as error:
            log.warning("the code store cannot be cleaned up: %s", error)

    async def _tidy_home(self, limit: int, *, is_patient: bool = False) -> Tidied:
        """Recent snapshots stay, and with them the code of jobs that are being submitted."""
        async with self._transfers.lock.exclusive(is_patient=is_patient):
            live = [job.spec.snapshot for job in await self._store.jobs.in_states(_LIVE) if job.spec.snapshot]
            own = [self._sdk.tree] if self._sdk.tree else []
            own += await self._store.sweeps.snapshots()
            own += [spec.snapshot for spec in await self._store.services.specs() if spec.snapshot]
            done = await asyncio.to_thread(self._snapshots.tidy, limit, [*live, *own])
        return Tidied(None, done.freed_bytes, done.kept_bytes, done.roots)

    async def _live_folders(self) -> list[str]:
        """Those that jobs which have not ended need, and trials and replicas that may still be made."""
        live = await self._store.jobs.in_states(_LIVE)
        specs = [*(job.spec for job in live), *await self._store.services.specs()]
        return [*(one.tree for spec in specs for one in spec.folders), *await self._store.sweeps.folders()]

    # --- sending -----------------------------------------------------------------------------------------------

    def has(self, snapshot: str) -> bool:
        """Whether a job with this code could be started again."""
        return self._snapshots.has(snapshot)

    def holds(self, snapshot: str, path: str) -> bool:
        """Whether a file is in it. Blocks."""
        return self._snapshots.holds(snapshot, path)

    async def imports(self, snapshot: str, script: str) -> Imports:
        """What the script in it imports as it begins."""
        return await asyncio.to_thread(self._imports.of, snapshot, script)

    async def uses(self, snapshot: str, script: str, module: str) -> bool:
        """Whether the script in it imports this module, as far as its source tells."""
        return await asyncio.to_thread(self._imports.uses, snapshot, script, module)

    async def sdk(self) -> str:
        """The tree with UGRO's own package: its hash. It is stored here when this returns."""
        tree = await asyncio.to_thread(self._sdk.stored)
        self._transfers.own.add(tree)
        return tree

    async def imports_sdk(self, spec: JobSpec) -> bool:
        """Whether UGRO's own package should go with such a job."""
        if (known := self._imports.known_sdk(spec)) is not None:
            return known
        return await asyncio.to_thread(self._imports.sdk, spec)

    async def difference(self, old: str, new: str) -> CodeDiff:
        return await asyncio.to_thread(code_diff, self._snapshots.store, old, new)

    async def bring(self, snapshot: str | None, nodes: Iterable[str]) -> None:
        if snapshot is None:
            return
        self._allow()
        outcomes = await asyncio.gather(
            *(self._transfers.ensure(node, snapshot) for node in nodes), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _allow(self) -> None:
        sync = self._cluster.config.sync
        self._transfers.allow(sync.max_parallel_transfers, sync.store_limit)

    def forget(self, snapshot: str | None, node: str) -> None:
        """The node lacks the code of a job, or UGRO's package: both are looked for before the next start there."""
        for tree in (snapshot, self._sdk.tree):
            if tree is not None:
                self._transfers.forget(node, tree)

    def forget_all(self, spec: JobSpec, node: str, begins_as: str | None = None) -> None:
        """The same for all that goes with a job. ``begins_as``: its folder, if it is not its code alone."""
        self.forget(spec.snapshot, node)
        self.forget(begins_as, node)
        self.folders.forget(spec.folders, node)

    def moved_at(self, job: Job, begins_as: str | None = None) -> float:
        """When the transfer of its code last made progress, by the monotonic clock; 0 if there is none."""
        own = [tree for tree in (job.spec.snapshot, self._sdk.tree, begins_as) if tree is not None]
        moved = [self._transfers.moved.get((node, tree), 0.0) for node in _nodes(job) for tree in own]
        return max([*moved, self.folders.moved_at(job)])

    def progress(self, job: Job) -> str | None:
        """A sentence, while its code is being sent."""
        under_way = {node: self._transfers.transfer(node, job.spec.snapshot or "") for node in _nodes(job)}
        found = {node: one.progress for node, one in under_way.items() if one is not None and one.bytes}
        if not found:
            return self.folders.progress(job)
        nodes = ", ".join(found) if len(found) <= _MOST_NAMED else f"{len(found)} nodes"
        return f"sending code to {nodes}: {together(found.values())}"

    def sent_bytes(self, snapshot: str, node: str) -> int | None:
        """So far, of a transfer that is under way."""
        transfer = self._transfers.transfer(node, snapshot)
        return transfer.sent.bytes if transfer is not None else None

    def listen(self, tell: Callable[[float], None]) -> None:
        """Calls ``tell`` with the duration of each transfer, in seconds."""
        self._transfers.on_sync = tell

    @property
    def totals(self) -> SyncTotals:
        return self._transfers.totals

    def end(self) -> None:
        """Takes no more snapshots."""
        self._snapshots.end()
        self.folders.end()

    async def close(self) -> None:
        if self._making_room is not None:
            self._making_room.cancel()
            await asyncio.gather(self._making_room, return_exceptions=True)
        await self._transfers.close()
        await self.folders.close()

    # --- by hand -----------------------------------------------------------------------------------------------

    async def sync(
        self, snapshot: Snapshot, nodes: Sequence[str], *, dry_run: bool
    ) -> AsyncGenerator[list[SyncReport]]:
        """Reports on each node, repeatedly until all are done."""
        work = self._would if dry_run else self._bring_one
        tasks = {node: asyncio.create_task(work(snapshot, node), name=f"sync {node}") for node in nodes}
        reported: set[str] = set()
        try:
            while len(reported) < len(tasks):
                await asyncio.wait(
                    [task for task in tasks.values() if not task.done()] or tasks.values(),
                    timeout=_LOOK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                done = [node for node, task in tasks.items() if task.done() and node not in reported]
                reported.update(done)
                under_way = [self._transfers.transfer(node, snapshot.id) for node in tasks if node not in reported]
                going = zip([node for node in tasks if node not in reported], under_way, strict=True)
                yield [tasks[node].result() for node in done] + [one.report(node) for node, one in going if one]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _bring_one(self, snapshot: Snapshot, node: str) -> SyncReport:
        self._allow()
        try:
            await self._transfers.look_again(node, snapshot.id)
            return await self._transfers.ensure(node, snapshot.id)
        except UgroError as error:
            return SyncReport(node, "failed", error=error.message, hint=error.hint)

    async def _would(self, snapshot: Snapshot, node: str) -> SyncReport:
        try:
            async with self._transfers.lock.shared():
                ids, why = await self._transfers.lacking(node, snapshot.id)
                base = await self._transfers.last(node, snapshot.folder)
                found, count, size = await asyncio.to_thread(
                    preview, self._snapshots.store, trees.parse_id(snapshot.id), base, frozenset(ids)
                )
        except UgroError as error:
            return SyncReport(node, "failed", error=error.message, hint=error.hint)
        return SyncReport(node, "would", why, count, size, travels=found)

    async def tidy(self, nodes: Sequence[str], *, everything: bool) -> list[Tidied]:
        """On the nodes and on this machine."""
        limit = 0 if everything else self._cluster.config.sync.store_limit
        code = [*await asyncio.gather(*(self._tidy(node, limit) for node in nodes)), await self._tidy_home(limit)]
        folders = await self.folders.tidy(nodes, everything=everything)
        return [both(one, other) for one, other in zip(code, folders, strict=True)]

    async def _tidy(self, node: str, limit: int) -> Tidied:
        try:
            return await self._transfers.contents(node).tidy(limit)
        except UgroError as error:
            return Tidied(node, error=error.message)


def _nodes(job: Job) -> tuple[str, ...]:
    return job.placement.nodes if job.placement else ()
