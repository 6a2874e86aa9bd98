"""Fetches the files that runs make: while they run as far as possible, and the rest before a run is removed.

A run is looked at every few seconds; of a file that grew, only what was added is fetched. What is not to be fetched is
kept on the node, and fetched from there when somebody asks for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ugro.kernel.files.node_files import Listing, NodeFiles, Source, Wanted, Where, checkpoints_of, kept_of, outputs_of
from ugro.kernel.files.results.file_store import DiskFull, FileTransfer, Polling, report_end
from ugro.kernel.files.results.job_folder import attempt_folder, delete_results, link_view, write_config
from ugro.kernel.files.results.output_store import Arrived, OutputStore
from ugro.kernel.files.rules import Choice, Left, NamedBy, Selection, choose, clashing, is_being_written, nobody
from ugro.kernel.jobs.model import Job, ResultRule
from ugro.kernel.jobs.records import Plan
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.errors import RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.node.files.listing import PART, RunFile

log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_FIRST_LOOK_S = 1.0
_LOOK_S = 2.0
_LONGEST_PAUSE_S = 10.0  # while there is nothing
# The node walks through the whole working directory for a look: that may take 2 % of one core.
_REST = 50
_MOST_SCOUTED = 1000

Key = tuple[int, int, str, bool]  # job, attempt, node, whether it is about checkpoints
Describe = Callable[[], Awaitable[None]]
# By the hash of a job's code: what its ignore files say.
IgnoreRules = Callable[[str | None], NamedBy]
IsWanted = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class Run:
    """An attempt's part on one node, and which of its files are to be fetched."""

    job: int
    attempt: int
    node: str
    is_first: bool = True  # the node of rank 0
    rule: ResultRule = field(default_factory=ResultRule)
    patterns: tuple[str, ...] = ()  # of files in its working directory that it names
    folder: str = "checkpoints"  # of checkpoints, among its files
    snapshot: str | None = None  # its code
    where: Where | None = None  # it is about the checkpoints of its job, which are not among its files

    @property
    def key(self) -> Key:
        return self.job, self.attempt, self.node, self.where is not None

    @property
    def source(self) -> Source:
        return outputs_of(self.job, self.attempt) if self.where is None else checkpoints_of(self.where)

    @property
    def kept(self) -> Source:
        """What it left on the node."""
        return kept_of(self.job, self.attempt, are_checkpoints=self.where is not None)


@dataclass(frozen=True, slots=True)
class Progress:
    """What the last look found."""

    files: int = 0
    bytes: int = 0
    missing_files: int = 0
    missing_bytes: int = 0
    problem: str | None = None


class OutputSync:
    def __init__(
        self,
        folder: Path,
        node: Callable[[str], Node],
        identity: Identity,
        ignore_rules: IgnoreRules = lambda snapshot: nobody,
    ) -> None:
        """``folder`` has one for each job; ``node`` raises NotFound for one that is no longer known."""
        self._folder = folder
        self._node = node
        self._identity = identity
        self._ignore_rules = ignore_rules
        self._fetches: dict[Key, asyncio.Task[None]] = {}
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
        if run.patterns:
            self._poll(run, describe)
            return
        waiting[run.key] = (run, describe)
        if run.node not in self._scouts:
            task = asyncio.create_task(self._scout(run.node), name=f"outputs on {run.node}")
            self._scouts[run.node] = task
            task.add_done_callback(report_end)

    async def fetch_all(self, run: Run, seeds: Mapping[bytes, Path] | None = None) -> None:
        """The run has ended: when this returns, all is here and on the disk; what is left there outlives the run.

        ``seeds``: files that are here already, perhaps the same, and their names.
        """
        store = await asyncio.to_thread(self._store, run)
        if (arrived := await asyncio.to_thread(store.arrived)) is not None and arrived.is_kept:
            return
        async with self._polling.lock(run.key):
            self._unfollow(run)
            try:
                await self._fetch_all(run, await asyncio.to_thread(self._store, run), seeds or {})
            except OSError as error:
                problem = DiskFull(f"outputs cannot be written here: {error}", hint=f"check the disk of {store.root}")
                self._report(run, str(problem))
                raise problem from error
            except UgroError as error:
                self._report(run, str(error))
                raise
        self.forget(run)

    def attempt_folder(self, job: int, attempt: int) -> Path:
        return attempt_folder(self._folder / str(job), attempt)

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
        tasks = [*self._scouts.values(), *self._fetches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._polling.close(), *tasks, return_exceptions=True)

    # --- while it runs -----------------------------------------------------------------------------------------

    async def _scout(self, node: str) -> None:
        """One call for all runs on a node that have written nothing yet: most never do."""
        waiting = self._waiting[node]
        cpu_s = 0.0
        try:
            while waiting:
                await asyncio.sleep(max(_FIRST_LOOK_S, _REST * cpu_s))
                found, cpu_s = await self._written(node, list(waiting.values())[:_MOST_SCOUTED])
                for run, describe in found:
                    del waiting[run.key]
                    self._poll(run, describe)
        finally:
            del self._scouts[node], self._waiting[node]

    async def _written(
        self, node: str, waiting: Sequence[tuple[Run, Describe]]
    ) -> tuple[list[tuple[Run, Describe]], float]:
        by_run = {(run.job, run.attempt): (run, describe) for run, describe in waiting}
        try:
            found, cpu_s = await self._files(node).written(list(by_run))
        except (Unreachable, TimedOut, RemoteFailure):
            return [], 0.0
        known = self._waiting[node]  # those that were not forgotten meanwhile
        return [by_run[key] for key in found if by_run[key][0].key in known], cpu_s

    def _poll(self, run: Run, describe: Describe) -> None:
        store = self._store(run)
        pause_s = _LOOK_S

        async def look() -> float:
            nonlocal pause_s
            has_any, cpu_s = await self._look(run, store)
            pause_s = _LOOK_S if has_any else min(_LONGEST_PAUSE_S, pause_s * 1.5)
            return max(pause_s, _REST * cpu_s)

        name = f"outputs of job {run.job}, attempt {run.attempt} on {run.node}"
        self._polling.start(run.key, name, look, before=describe)

    async def _look(self, run: Run, store: OutputStore) -> tuple[bool, float]:
        """Whether there are any, and what it cost the node to list them, in seconds."""
        try:
            transfer = self._transfer(run, store)
            listing = await transfer.list_files()
            if listing.files:
                await self._fetch_some(run, transfer, store, listing)
        except (Unreachable, TimedOut):
            return False, 0.0
        except (UgroError, OSError) as error:
            self._report(run, str(error))
            return False, 0.0
        return bool(listing.files), listing.cpu_s

    async def _fetch_some(self, run: Run, transfer: FileTransfer, store: OutputStore, listing: Listing) -> None:
        def missing() -> list[Wanted]:
            chosen = _choose(store, listing, self._selection(run)).wanted
            store.note_work(chosen, run.patterns)
            found = store.missing(chosen)
            return [one for one in found if one.offset or not is_being_written(one.file, run.folder, listing.now_ns)]

        store.problems.clear()  # what could not be read is tried again
        wanted = await to_the_end(missing)
        await transfer.fetch(listing.files, wanted, is_final=False)
        if wanted:
            await to_the_end(partial(link_view, self._folder / str(run.job), run.attempt))

    # --- when it has ended -------------------------------------------------------------------------------------

    async def _fetch_all(self, run: Run, store: OutputStore, seeds: Mapping[bytes, Path]) -> None:
        transfer = self._transfer(run, store)
        choice, unlisted = Choice((), (), ()), 0

        def chosen(listing: Listing) -> Sequence[RunFile]:
            nonlocal choice, unlisted
            choice, unlisted = _choose(store, listing, self._selection(run)), listing.unlisted
            store.note_work(choice.wanted, run.patterns)
            for file in choice.wanted:
                if file.name in seeds:
                    store.seed(file.name, seeds[file.name])
            return choice.wanted

        await transfer.fetch_all(chosen)
        # Files that cannot be read stay on the node, too: nothing is deleted that was not fetched.
        unread = tuple(Left(one, store.problems[one.name]) for one in choice.wanted if one.name in store.problems)
        choice = replace(choice, left=choice.left + unread)
        is_kept = not choice.left and not unlisted
        await to_the_end(partial(store.finish, choice, unlisted, is_kept=is_kept))
        if not is_kept:
            names = [one.file.name for one in choice.left]
            await transfer.files.keep(transfer.source, names, with_unlisted=unlisted > 0)
            await to_the_end(partial(store.finish, choice, unlisted, is_kept=True))
        await to_the_end(partial(link_view, self._folder / str(run.job), run.attempt))
        log.info("fetched all outputs", extra={"job": run.job, "attempt": run.attempt, "node": run.node})

    # --- what was left ------------------------------------------------------------------------------------------

    async def fetch_left(self, run: Run, is_wanted: IsWanted) -> None:
        """Starts to fetch what was left on the node, in the background; after what is fetched now. May raise."""
        store = self._store(run)
        transfer = FileTransfer(self._files(run.node), run.kept, store, partial(self._note, run))
        listing = await transfer.list_files()
        wanted = await asyncio.to_thread(_asked_for, store, listing, is_wanted)
        before = self._fetches.get(run.key)
        if before is None or wanted:
            self._note(run, listing.files, [Wanted(file) for file in wanted])
        name = f"what job {run.job} left on {run.node}"
        task = asyncio.create_task(self._fetch_left(run, transfer, is_wanted, before), name=name)
        self._fetches[run.key] = task
        task.add_done_callback(report_end)

    def fetching(self, run: Run) -> Progress | None:
        """How far fetching what was left is, or why the last try failed."""
        return self._progress.get(run.key)

    async def _fetch_left(
        self, run: Run, transfer: FileTransfer, is_wanted: IsWanted, before: asyncio.Task[None] | None
    ) -> None:
        store = transfer.store
        assert isinstance(store, OutputStore)

        try:
            if before is not None:
                await asyncio.wait([before])
            async with self._polling.lock(run.key):
                await transfer.fetch_all(lambda listing: _asked_for(store, listing, is_wanted))
                await self._settle_left(run, transfer, store)
            if self._is_last(run):
                self._progress.pop(run.key, None)
        except (UgroError, OSError) as error:
            self._report(run, str(error))
        finally:
            if self._is_last(run):
                del self._fetches[run.key]

    def _is_last(self, run: Run) -> bool:
        """Nobody has asked for more since: then what it says of its progress is theirs."""
        return self._fetches.get(run.key) is asyncio.current_task()

    async def _settle_left(self, run: Run, transfer: FileTransfer, store: OutputStore) -> None:
        """What is here, and on the disk, is deleted on the node."""
        listing = await transfer.list_files()
        missing = {one.file.name for one in await to_the_end(partial(store.missing, listing.files))}
        await to_the_end(store.sync)
        not_here = missing | store.problems.keys()
        here = [file.name for file in listing.files if file.name not in not_here]
        await transfer.files.drop_kept(transfer.source, here)
        left = [file for file in listing.files if file.name in not_here]
        await to_the_end(partial(store.note_left, left, listing.unlisted))
        await to_the_end(partial(link_view, self._folder / str(run.job), run.attempt))
        log.info("fetched %d files that were left", len(here), extra={"job": run.job, "node": run.node})

    async def forget_left(self, run: Run) -> None:
        """It was deleted on the node."""
        if (task := self._fetches.get(run.key)) is not None:
            task.cancel()
            await asyncio.wait([task])
        self._progress.pop(run.key, None)
        await to_the_end(partial(self._store(run).note_left, ()))

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
        return FileTransfer(self._files(run.node), run.source, store, partial(self._note, run))

    def _selection(self, run: Run) -> Selection:
        return Selection(run.rule, run.folder, self._ignore_rules(run.snapshot))

    def _files(self, node: str) -> NodeFiles:
        return NodeFiles(self._node(node), self._identity, _CONNECT_S)

    def _store(self, run: Run) -> OutputStore:
        folder, part = attempt_folder(self._folder / str(run.job), run.attempt), PART if run.where else ""
        return OutputStore(folder, run.node, is_first=run.is_first, part=part)

    def _unfollow(self, run: Run) -> None:
        self._waiting.get(run.node, {}).pop(run.key, None)
        self._polling.stop(run.key)


def _asked_for(store: OutputStore, listing: Listing, is_wanted: IsWanted) -> list[RunFile]:
    """Not those that would replace another file here."""
    clashes = {file.name for file in clashing(listing.files, store.taken())}
    return [file for file in listing.files if file.name not in clashes and is_wanted(file.name)]


def _choose(store: OutputStore, listing: Listing, by: Selection) -> Choice:
    """Checkpoints that were fetched and are gone from the node count, too; the rule may then drop them here."""
    choice = choose(listing.files, by, store.only_here(listing.files), store.taken())
    for name in (*choice.outdated, *(one.file.name for one in choice.left)):
        store.drop(name)
    return choice
