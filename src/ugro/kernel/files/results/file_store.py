"""Files fetched from one node into a folder here, and a journal of what they were like on the node.

A file that grew is extended in place; a new or rewritten one replaces the old one when it is complete. What has arrived
of an interrupted transfer is used by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import random
import shutil
import stat
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from ugro.kernel.files.node_files import Listing, NodeFiles, Source, Wanted, packed
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.errors import NotFound, RemoteFailure, UgroError
from ugro.kernel.support.quantities import format_size
from ugro.node.files import transfer as resumable
from ugro.node.files.listing import RunFile
from ugro.node.files.transfer import Folder, Head, Writer, is_file

# Left free on this disk: it also holds the database of all jobs.
SPARE_BYTES = 256 << 20
_UNSETTLED = -1
_libc = ctypes.CDLL(None, use_errno=True)


class DiskFull(UgroError):
    """Files stay on the node until there is room here."""


class _Known(NamedTuple):
    """A file as it was on the node when it was fetched."""

    size: int
    changed_ns: int
    inode: int
    is_pieced: bool  # assembled from parts of which only the ends were compared


class FileStore:
    """Not async: call it in a thread, one call at a time."""

    def __init__(self, root: Path, state: Path, name: str) -> None:
        """``state`` holds the journal and incomplete files, each with ``name`` in its name."""
        self.root = root
        self.problems: dict[bytes, str] = {}  # of files that cannot be read on the node
        self._state = state
        self._journal = state / f"{name}.journal"
        self._partial = state / f"{name}.partial"
        self._folder = Folder(str(root), str(self._partial))
        self._spoilt: set[bytes] = set()
        self._read: dict[bytes, _Known] | None = None

    @property
    def _known(self) -> dict[bytes, _Known]:
        if self._read is None:
            self._read = _read_journal(self._journal)
        return self._read

    # --- what is here ------------------------------------------------------------------------------------------

    def missing(self, files: Sequence[RunFile]) -> list[Wanted]:
        """What is to be fetched of these; files that cannot be read on the node are left out."""
        readable = (file for file in files if not file.is_folder and file.name not in self.problems)
        return [one for one in map(self._wanted, readable) if one is not None]

    def _wanted(self, file: RunFile) -> Wanted | None:
        known = self._known.get(file.name)
        if known is not None and known[:3] == (file.size, file.changed_ns, file.inode) and self._has(file):
            return None
        base = None if file.name in self._spoilt else self._folder.base(file.name)
        if base is None:
            return Wanted(file)
        fd = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            return Wanted(file, size, resumable.check_of(fd, size)) if 0 < size <= file.size else Wanted(file)
        finally:
            os.close(fd)

    def only_here(self, listed: Sequence[RunFile]) -> list[RunFile]:
        """Files that were fetched and are no longer on the node."""
        names = {file.name for file in listed}
        return [
            RunFile(name, known.size, known.changed_ns, known.inode)
            for name, known in self._known.items()
            if name not in names and is_file(self._folder.path(name))
        ]

    def fetched(self) -> list[bytes]:
        """The names of files that were fetched and are here."""
        return [name for name in self._known if is_file(self._folder.path(name))]

    def seed(self, name: bytes, path: Path) -> None:
        """A file that is here already, perhaps the same: what it lacks is fetched. It is not copied."""
        target = self._folder.path(name)
        if not os.path.lexists(target):
            os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
            with contextlib.suppress(OSError):  # no links here: then it is fetched
                os.link(path, target)

    def pieced(self) -> list[bytes]:
        return [name for name, known in self._known.items() if known.is_pieced]

    def compare(self, name: bytes, content_hash: str | None) -> None:
        """If the file here differs, it is fetched again. None: it is gone from the node, and ours is what counts."""
        known = self._known[name]._replace(is_pieced=False)
        if content_hash is None or self._content_hash(name) == content_hash:
            self._note(name, known)
        else:
            self._spoilt.add(name)
            self._note(name, known._replace(changed_ns=_UNSETTLED))

    def _has(self, file: RunFile) -> bool:
        with contextlib.suppress(OSError):
            about = os.lstat(self._folder.path(file.name))
            return stat.S_ISREG(about.st_mode) and about.st_size == file.size
        return False

    def _content_hash(self, name: bytes) -> str | None:
        with contextlib.suppress(OSError):
            fd = os.open(self._folder.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return resumable.content_hash(fd)
            finally:
                os.close(fd)
        return None

    # --- what arrives ------------------------------------------------------------------------------------------

    def writer(self, wanted: Sequence[Wanted], *, is_final: bool) -> Writer:
        """``is_final``: nobody writes to these files any more."""
        for folder in (self.root, self._partial):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

        def ended(name: bytes, head: Head, state: int) -> None:
            if head.problem is not None:
                self.problems[name] = head.problem
            elif state != resumable.BROKEN:
                self._arrived(name, head, is_settled=is_final or state == resumable.WHOLE)

        return Writer(self._folder, [one.file.name for one in wanted], self._expect_room, ended)

    def make_folders(self, files: Sequence[RunFile]) -> None:
        for file in files:
            if file.is_folder:
                self._folder.make(file.name)

    def drop(self, name: bytes) -> None:
        """Deletes a file that a newer one replaces, by the rule of the job, if it was fetched into this store."""
        if name in self._known:
            with contextlib.suppress(OSError):
                os.unlink(self._folder.path(name))

    def drop_partial(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def drop_state(self) -> None:
        """All files are here, and nothing more will be fetched."""
        self.drop_partial()
        self._journal.unlink(missing_ok=True)

    def _arrived(self, name: bytes, head: Head, *, is_settled: bool) -> None:
        self._spoilt.discard(name)
        self.problems.pop(name, None)
        is_pieced = head.offset > 0 and not resumable.is_all_checked(head.offset)
        self._note(name, _Known(head.size, head.changed_ns if is_settled else _UNSETTLED, head.inode, is_pieced))

    def _note(self, name: bytes, known: _Known) -> None:
        self._known[name] = known
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._journal.open("a", encoding="ascii") as journal:
            journal.write(json.dumps([name.decode("utf-8", "surrogateescape"), *known]) + "\n")

    def _expect_room(self, length: int) -> None:
        expect_room(self._state, length)  # always there, and on the same disk


def expect_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size + SPARE_BYTES > free:
        raise DiskFull(
            f"{format_size(size)} do not fit here, where {format_size(free)} are free; they stay on the node",
            hint=f"make room on the disk of {folder}",
        )


def sync_file_system(path: Path) -> None:
    """One call instead of one for each file: there may be ten thousand small ones."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(fd)


def _read_journal(path: Path) -> dict[bytes, _Known]:
    known: dict[bytes, _Known] = {}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as journal:
        for line in journal:
            with contextlib.suppress(ValueError, TypeError):  # a crash may have cut the last one
                name, size, changed_ns, inode, is_pieced = json.loads(line)
                entry = _Known(int(size), int(changed_ns), int(inode), bool(is_pieced))
                known[name.encode("utf-8", "surrogateescape")] = entry
    return known


# --- fetching into a store --------------------------------------------------------------------------------------------
# Outputs and checkpoints are fetched in the same way. A transfer lists the files on the node, fetches what is missing
# from the byte where the last one stopped, and in the end compares the content of files that were assembled from parts.


log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
Look = Callable[[], Awaitable[float]]
Before = Callable[[], Awaitable[None]]

_LOOKS = 5  # at files that should no longer change


@dataclass(slots=True)
class FileTransfer:
    """From one node to one store. ``noted`` gets what is listed and what of it is still missing."""

    files: NodeFiles
    source: Source
    store: FileStore
    noted: Callable[[Sequence[RunFile], Sequence[Wanted]], None] = lambda listed, missing: None

    async def list_files(self) -> Listing:
        return await self.files.list_files(self.source)

    async def fetch(self, listed: Sequence[RunFile], wanted: Sequence[Wanted], *, is_final: bool) -> None:
        self.noted(listed, wanted)
        left = list(wanted)
        for part in packed(wanted, lambda one: one.file.name):
            writer = await to_the_end(partial(self.store.writer, part, is_final=is_final))
            await self.files.fetch(self.source, part, writer)
            left = left[len(part) :]
            self.noted(listed, left)

    async def fetch_all(self, choose: Callable[[Listing], Sequence[RunFile]]) -> None:
        """Nobody writes there any more: when this returns, the chosen files are here as they are on the node."""
        for _ in range(_LOOKS):
            listing = await self.list_files()
            chosen = await to_the_end(partial(choose, listing))
            wanted = await to_the_end(partial(self.store.missing, chosen))
            if not wanted and not await asyncio.to_thread(self.store.pieced):
                await to_the_end(partial(self.store.make_folders, chosen))
                return
            await self.fetch(listing.files, wanted, is_final=True)
            await self._compare()
        raise RemoteFailure("files keep changing after their run ended", subject=self.files.name, cause="changing")

    async def _compare(self) -> None:
        names = self.store.pieced()
        if names:
            hashes = await self.files.hashes(self.source, names)
            for name in names:
                await to_the_end(partial(self.store.compare, name, hashes.get(name)))


class Polling(Generic[K]):
    """Looks at files on nodes again and again: one task, and one transfer at a time, for each key."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[None]] = {}
        self._locks: dict[K, asyncio.Lock] = {}

    def start(self, key: K, name: str, look: Look, before: Before | None = None) -> None:
        """``look`` returns the pause until the next one, in seconds. A task of another name is replaced."""
        if (task := self._tasks.get(key)) is not None and task.get_name() == name:
            return
        self.stop(key)
        self._tasks[key] = task = asyncio.create_task(self._run(key, look, before), name=name)
        task.add_done_callback(report_end)

    def __contains__(self, key: K) -> bool:
        return key in self._tasks

    def lock(self, key: K) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def stop(self, key: K) -> None:
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    def forget(self, key: K) -> None:
        self.stop(key)
        self._locks.pop(key, None)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for key in list(self._tasks):
            self.stop(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: K, look: Look, before: Before | None) -> None:
        if before is not None:
            await before()
        while True:
            began = asyncio.get_running_loop().time()
            async with self.lock(key):
                pause_s = await look()
            took_s = asyncio.get_running_loop().time() - began
            # At least as long as the transfer took: the job needs the network, too.
            await asyncio.sleep(max(pause_s * random.uniform(0.75, 1.25), took_s))


def report_end(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (bug := task.exception()) is None:
        return
    if isinstance(bug, NotFound):  # the node was removed from the cluster
        log.info("no longer fetching %s: %s", task.get_name(), bug)
    else:
        log.error("no longer fetching %s", task.get_name(), exc_info=bug)
