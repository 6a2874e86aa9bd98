"""Fetches files of runs into a store here: what outputs and checkpoints have in common.

A transfer lists the files on the node, fetches what is missing from the byte where the last one stopped, and in the end
compares the content of files that were assembled from parts.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from ugro.agent.artifacts.file_store import FileStore
from ugro.agent.support.aio import to_the_end
from ugro.core.errors import NotFound, RemoteFailure
from ugro.nodes.files import Listing, NodeFiles, Source, Wanted, packed
from ugro.remote.files.listing import RunFile

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
