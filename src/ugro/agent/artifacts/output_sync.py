"""Fetches the outputs of runs: while they run as far as possible, and all of them before a run is removed.

A run is looked at every few seconds; of a file that grew, only what was added is fetched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ugro.agent.artifacts.file_store import DiskFull, FileStore
from ugro.agent.artifacts.file_sync import FileTransfer, Polling, report_end
from ugro.agent.artifacts.job_folder import attempt_folder, delete_results, link_view, write_config
from ugro.agent.artifacts.output_store import Arrived, OutputStore
from ugro.agent.support.aio import to_the_end
from ugro.core.errors import RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.core.job import Job, ResultRule
from ugro.core.plan import Plan
from ugro.nodes.files import Listing, NodeFiles, Wanted, outputs_of
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity
from ugro.policy.result_selection import Choice, Left, choose, is_being_written
from ugro.remote.files.listing import RunFile

log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_FIRST_LOOK_S = 1.0
_LOOK_S = 2.0
_LONGEST_PAUSE_S = 10.0  # while there is nothing
_MOST_SCOUTED = 1000

Key = tuple[int, int, str]  # job, attempt, node
Describe = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Run:
    """An attempt's part on one node, and which of its files are to be fetched."""

    job: int
    attempt: int
    node: str
    is_first: bool = True  # the node of rank 0
    rule: ResultRule = field(default_factory=ResultRule)
    has_patterns: bool = False  # it names files of its working directory

    @property
    def key(self) -> Key:
        return self.job, self.attempt, self.node


@dataclass(frozen=True, slots=True)
class Progress:
    """What the last look found."""

    files: int = 0
    bytes: int = 0
    missing_files: int = 0
    missing_bytes: int = 0
    problem: str | None = None


class OutputSync:
    def __init__(self, folder: Path, node: Callable[[str], Node], identity: Identity) -> None:
        """``folder`` has one for each job; ``node`` raises NotFound for one that is no longer known."""
        self._folder = folder
        self._node = node
        self._identity = identity
        self._polling: Polling[Key] = Polling()
        self._waiting: dict[str, dict[Key, tuple[Run, Describe]]] = {}  # by node
        self._scouts: dict[str, asyncio.Task[None]] = {}
        self._progress: dict[Key, Progress] = {}

    def follow(self, run: Run, describe: Describe) -> None:
        """Starts to fetch, once for each run, until all of it is fetched or it is forgotten.

        ``describe`` is called before the first look at a run that has written something.
        """
        waiting = self._waiting.setdefault(run.node, {})
        if run.key in self._polling or run.key in waiting:
            return
        if run.has_patterns:
            self._poll(run, describe)
            return
        waiting[run.key] = (run, describe)
        if run.node not in self._scouts:
            task = asyncio.create_task(self._scout(run.node), name=f"outputs on {run.node}")
            self._scouts[run.node] = task
            task.add_done_callback(report_end)

    async def fetch_all(self, run: Run) -> None:
        """The run has ended: when this returns, all is here and on the disk; what is left there outlives the run."""
        store = await asyncio.to_thread(self._store, run)
        if (arrived := await asyncio.to_thread(store.arrived)) is not None and arrived.is_kept:
            return
        async with self._polling.lock(run.key):
            self._unfollow(run)
            try:
                await self._fetch_all(run, await asyncio.to_thread(self._store, run))
            except OSError as error:
                problem = DiskFull(f"outputs cannot be written here: {error}", hint=f"check the disk of {store.root}")
                self._report(run, str(problem))
                raise problem from error
            except UgroError as error:
                self._report(run, str(error))
                raise
        self.forget(run)

    def describe(self, job: Job, plan: Plan | None) -> None:
        """Writes the job's spec and plan into its folder. Blocks."""
        folder = self._folder / str(job.id)
        write_config(folder, job, plan)
        link_view(folder, job.attempt)

    async def drop(self, run: Run) -> None:
        """Fetches nothing more of the run; deletes what is here, and what is kept on its node."""
        self._unfollow(run)
        async with self._polling.lock(run.key):
            await to_the_end(partial(delete_results, self._folder / str(run.job)))
        await self.drop_kept(run.job, run.node)
        self.forget(run)

    async def drop_kept(self, job: int, node: str) -> None:
        """Deletes the files of all attempts that are kept on the node."""
        await self._files(node).drop_kept(outputs_of(job, 1))

    def forget(self, run: Run) -> None:
        self._unfollow(run)
        self._polling.forget(run.key)
        self._progress.pop(run.key, None)

    def known(self, run: Run) -> Arrived | Progress | None:
        """What is here, or what the last look found. Blocks."""
        return self._store(run).arrived() or self._progress.get(run.key)

    async def close(self) -> None:
        tasks = list(self._scouts.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._polling.close(), *tasks, return_exceptions=True)

    # --- while it runs -----------------------------------------------------------------------------------------

    async def _scout(self, node: str) -> None:
        """One call for all runs on a node that have written nothing yet: most never do."""
        waiting = self._waiting[node]
        try:
            while waiting:
                await asyncio.sleep(_FIRST_LOOK_S)
                for run, describe in await self._written(node, list(waiting.values())[:_MOST_SCOUTED]):
                    del waiting[run.key]
                    self._poll(run, describe)
        finally:
            del self._scouts[node], self._waiting[node]

    async def _written(self, node: str, waiting: Sequence[tuple[Run, Describe]]) -> list[tuple[Run, Describe]]:
        by_run = {(run.job, run.attempt): (run, describe) for run, describe in waiting}
        try:
            found = await self._files(node).written(list(by_run))
        except (Unreachable, TimedOut, RemoteFailure):
            return []
        return [by_run[key] for key in found if by_run[key][0].key in self._waiting[node]]  # not forgotten meanwhile

    def _poll(self, run: Run, describe: Describe) -> None:
        store = self._store(run)
        pause_s = _LOOK_S

        async def look() -> float:
            nonlocal pause_s
            pause_s = _LOOK_S if await self._look(run, store) else min(_LONGEST_PAUSE_S, pause_s * 1.5)
            return pause_s

        name = f"outputs of job {run.job}, attempt {run.attempt} on {run.node}"
        self._polling.start(run.key, name, look, before=describe)

    async def _look(self, run: Run, store: OutputStore) -> bool:
        """Whether there are any."""
        try:
            transfer = self._transfer(run, store)
            listing = await transfer.list_files()
            if listing.files:
                await self._fetch_some(run, transfer, listing)
        except (Unreachable, TimedOut):
            return False
        except (UgroError, OSError) as error:
            self._report(run, str(error))
            return False
        return bool(listing.files)

    async def _fetch_some(self, run: Run, transfer: FileTransfer, listing: Listing) -> None:
        def missing() -> list[Wanted]:
            found = transfer.store.missing(_choose(transfer.store, listing, run.rule).wanted)
            return [one for one in found if one.offset or not is_being_written(one.file, listing.now_ns)]

        transfer.store.problems.clear()  # what could not be read is tried again
        wanted = await to_the_end(missing)
        await transfer.fetch(listing.files, wanted, is_final=False)
        if wanted:
            await to_the_end(partial(link_view, self._folder / str(run.job), run.attempt))

    # --- when it has ended -------------------------------------------------------------------------------------

    async def _fetch_all(self, run: Run, store: OutputStore) -> None:
        transfer = self._transfer(run, store)
        choice = Choice((), (), ())

        def chosen(listing: Listing) -> Sequence[RunFile]:
            nonlocal choice
            if listing.unlisted:
                text = f"too many output files: {len(listing.files)} are listed, {listing.unlisted} are not"
                raise RemoteFailure(text, subject=run.node, cause="too-many")
            choice = _choose(store, listing, run.rule)
            return choice.wanted

        await transfer.fetch_all(chosen)
        # Files that cannot be read stay on the node, too: nothing is deleted that was not fetched.
        unread = tuple(Left(one, store.problems[one.name]) for one in choice.wanted if one.name in store.problems)
        choice = replace(choice, left=choice.left + unread)
        await to_the_end(partial(store.finish, choice, is_kept=not choice.left))
        if choice.left:
            await transfer.files.keep(transfer.source, [one.file.name for one in choice.left])
            await to_the_end(partial(store.finish, choice, is_kept=True))
        await to_the_end(partial(link_view, self._folder / str(run.job), run.attempt))
        log.info("fetched all outputs", extra={"job": run.job, "attempt": run.attempt, "node": run.node})

    # --- helpers -----------------------------------------------------------------------------------------------

    def _note(self, run: Run, listed: Sequence[RunFile], missing: Sequence[Wanted]) -> None:
        seen = (len(listed), sum(file.size for file in listed))
        self._progress[run.key] = Progress(*seen, len(missing), sum(one.file.size - one.offset for one in missing))

    def _report(self, run: Run, problem: str) -> None:
        before = self._progress.get(run.key, Progress())
        if before.problem != problem:
            log.warning("outputs were not fetched: %.500s", problem, extra={"job": run.job, "node": run.node})
        self._progress[run.key] = replace(before, problem=problem)

    def _transfer(self, run: Run, store: OutputStore) -> FileTransfer:
        source = outputs_of(run.job, run.attempt)
        return FileTransfer(self._files(run.node), source, store, partial(self._note, run))

    def _files(self, node: str) -> NodeFiles:
        return NodeFiles(self._node(node), self._identity, _CONNECT_S)

    def _store(self, run: Run) -> OutputStore:
        return OutputStore(attempt_folder(self._folder / str(run.job), run.attempt), run.node, is_first=run.is_first)

    def _unfollow(self, run: Run) -> None:
        self._waiting.get(run.node, {}).pop(run.key, None)
        self._polling.stop(run.key)


def _choose(store: FileStore, listing: Listing, rule: ResultRule) -> Choice:
    """Files that were fetched and are gone from the node count, too; the rule may then drop them here."""
    only_here = store.only_here(listing.files)
    choice = choose([*listing.files, *only_here], rule)
    gone = {file.name for file in only_here}
    for one in choice.left:
        store.drop(one.file.name)
    return Choice(
        tuple(file for file in choice.wanted if file.name not in gone),
        tuple(one for one in choice.left if one.file.name not in gone),
        choice.unsendable,
    )
