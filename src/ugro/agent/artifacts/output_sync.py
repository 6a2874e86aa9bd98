"""A run's outputs come home: while it runs as far as they are there, and all of them before the run is removed.

Looked at every few seconds while it runs; a growing file brings what it grew by. When the run is over, what was put
together of several parts is compared with what is on the node, by content.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ugro.agent.artifacts.job_folder import attempt_folder, delete_results, link_view, write_config
from ugro.agent.artifacts.output_store import HomeFull, RunHome
from ugro.agent.support.aio import to_the_end
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.core.job import Job, ResultRule
from ugro.core.plan import Plan
from ugro.nodes.node import Node
from ugro.nodes.outputs import Listing, NodeOutputs, Wanted, filled, packed
from ugro.nodes.runs import Identity
from ugro.policy.result_selection import Choice, Left, OutputFile, choose, is_being_written

log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_FIRST_LOOK_S = 1.0
_LOOK_S = 2.0
_LONGEST_PAUSE_S = 10.0  # while there is nothing
_LOOKS = 5  # at what should no longer change
_MOST_SCOUTED = 1000

Describe = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Run:
    """An attempt's part on one node, and what of it is to come."""

    job: int
    attempt: int
    node: str
    is_first: bool = True  # the node of rank 0
    rule: ResultRule = field(default_factory=ResultRule)
    has_patterns: bool = False  # it names files of its working directory

    @property
    def key(self) -> tuple[int, int, str]:
        return self.job, self.attempt, self.node


@dataclass(frozen=True, slots=True)
class Progress:
    """What was seen at the last look."""

    files: int = 0
    bytes: int = 0
    missing_files: int = 0
    missing_bytes: int = 0
    problem: str | None = None


class Results:
    def __init__(self, folder: Path, node: Callable[[str], Node], identity: Identity) -> None:
        """``folder`` holds one for each job; ``node`` raises NotFound for one that is no longer known."""
        self._folder = folder
        self._node = node
        self._identity = identity
        self._following: dict[tuple[int, int, str], asyncio.Task[None]] = {}
        self._waiting: dict[str, dict[tuple[int, int, str], tuple[Run, Describe]]] = {}  # by node
        self._scouts: dict[str, asyncio.Task[None]] = {}
        self._transfers: dict[tuple[int, int, str], asyncio.Lock] = {}
        self._progress: dict[tuple[int, int, str], Progress] = {}

    def follow(self, run: Run, describe: Describe) -> None:
        """Begins, or goes on; once for each run, until all of it is brought or it is forgotten.

        ``describe`` is done before the first look at a run that has written something.
        """
        waiting = self._waiting.setdefault(run.node, {})
        if run.key in self._following or run.key in waiting:
            return
        if run.has_patterns:
            self._bring_as_it_comes(run, describe)
            return
        waiting[run.key] = (run, describe)
        if run.node not in self._scouts:
            task = asyncio.create_task(self._scout(run.node), name=f"scout of outputs on {run.node}")
            self._scouts[run.node] = task
            task.add_done_callback(_report)

    async def bring(self, run: Run) -> None:
        """The run is over: when this returns, all is here and lasts; what stays there outlives the run."""
        home = await asyncio.to_thread(self._home, run)
        if (arrived := await asyncio.to_thread(home.arrived)) is not None and arrived.is_kept:
            return
        async with self._transfer(run):
            self._unfollow(run)
            try:
                await self._bring_all(run, await asyncio.to_thread(self._home, run))
            except OSError as error:
                problem = HomeFull(f"results cannot be written here: {error}", hint=f"look at the disk of {home.root}")
                self._tell(run, str(problem))
                raise problem from error
            except UgroError as error:
                self._tell(run, str(error))
                raise
        self.forget(run)

    def describe(self, job: Job, plan: Plan | None) -> None:
        """Blocks."""
        folder = self._folder / str(job.id)
        write_config(folder, job, plan)
        link_view(folder, job.attempt)

    async def drop(self, run: Run) -> None:
        """Nothing more of it comes; what came, and what stayed on its node, goes."""
        self._unfollow(run)
        async with self._transfer(run):
            await to_the_end(partial(delete_results, self._folder / str(run.job)))
        await self.drop_kept(run.job, run.node)
        self.forget(run)

    async def drop_kept(self, job: int, node: str) -> None:
        """What stayed on the node of any attempt goes."""
        await self._there(Run(job, 1, node)).forget()

    def forget(self, run: Run) -> None:
        self._unfollow(run)
        for known in (self._transfers, self._progress):
            known.pop(run.key, None)

    def progress(self, job: int, attempt: int, node: str) -> Progress | None:
        return self._progress.get((job, attempt, node))

    async def close(self) -> None:
        tasks = [*self._following.values(), *self._scouts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- while it runs -----------------------------------------------------------------------------------------

    async def _scout(self, node: str) -> None:
        """One question for all runs on a node that have written nothing yet: most never do."""
        waiting = self._waiting[node]
        try:
            while waiting:
                await asyncio.sleep(_FIRST_LOOK_S)
                for run, describe in await self._found(node, list(waiting.values())[:_MOST_SCOUTED]):
                    del waiting[run.key]
                    self._bring_as_it_comes(run, describe)
        finally:
            del self._scouts[node], self._waiting[node]

    async def _found(self, node: str, waiting: Sequence[tuple[Run, Describe]]) -> list[tuple[Run, Describe]]:
        by_run = {(run.job, run.attempt): (run, describe) for run, describe in waiting}
        try:
            found = await filled(self._node(node), self._identity, _CONNECT_S, list(by_run))
        except (Unreachable, TimedOut, RemoteFailure):
            return []
        return [by_run[key] for key in found if by_run[key][0].key in self._waiting[node]]  # not forgotten meanwhile

    def _bring_as_it_comes(self, run: Run, describe: Describe) -> None:
        name = f"outputs of job {run.job}, attempt {run.attempt} on {run.node}"
        self._following[run.key] = task = asyncio.create_task(self._keep_bringing(run, describe), name=name)
        task.add_done_callback(_report)

    async def _keep_bringing(self, run: Run, describe: Describe) -> None:
        await describe()
        pause_s = _LOOK_S
        home = await asyncio.to_thread(self._home, run)
        while True:
            began = asyncio.get_running_loop().time()
            async with self._transfer(run):
                has_some = await self._look(run, home)
            pause_s = _LOOK_S if has_some else min(_LONGEST_PAUSE_S, pause_s * 1.5)
            took_s = asyncio.get_running_loop().time() - began
            # As long as the transfer took: the network is there for the training, too.
            await asyncio.sleep(max(pause_s * random.uniform(0.75, 1.25), took_s))

    async def _look(self, run: Run, home: RunHome) -> bool:
        try:
            listing = await self._there(run).list()
            if listing.files:
                await self._bring_some(run, home, listing)
        except (Unreachable, TimedOut):
            return False
        except (UgroError, OSError) as error:
            self._tell(run, str(error))
            return False
        return bool(listing.files)

    async def _bring_some(self, run: Run, home: RunHome, listing: Listing) -> None:
        def missing() -> list[Wanted]:
            choice = _choose(home, listing, run.rule)
            found = filter(None, map(home.wanted, choice.wanted))
            return [one for one in found if one.offset or not is_being_written(one.file, listing.now_ns)]

        wanted = await to_the_end(missing)
        self._note(run, listing.files, wanted)
        if wanted:
            await self._fetch(run, home, wanted, is_final=False)
            self._note(run, listing.files, ())
            await to_the_end(partial(link_view, self._folder / str(run.job), run.attempt))

    # --- when it is over ---------------------------------------------------------------------------------------

    async def _bring_all(self, run: Run, home: RunHome) -> None:
        there = self._there(run)
        for _ in range(_LOOKS):
            listing = await there.list()
            choice = await to_the_end(partial(_choose, home, listing, run.rule))
            wanted = await to_the_end(lambda: _missing(home, choice))  # noqa: B023  # awaited here
            pieced = await asyncio.to_thread(home.pieced)
            self._note(run, listing.files, wanted)
            if not wanted and not pieced:
                break
            await self._fetch(run, home, wanted, is_final=True)
            await self._compare(there, home)
        else:
            raise RemoteFailure("its outputs change although it is over", subject=run.node, cause="changing")
        # What cannot be read there stays there, too: nothing is deleted that did not come.
        unread = tuple(Left(one, home.problems[one.name]) for one in choice.wanted if one.name in home.problems)
        choice = replace(choice, left=choice.left + unread)
        await to_the_end(partial(home.finish, choice, is_kept=not choice.left))
        if choice.left:
            await there.keep([one.file.name for one in choice.left])
            await to_the_end(partial(home.finish, choice, is_kept=True))
        await to_the_end(partial(link_view, self._folder / str(run.job), run.attempt))
        log.info("outputs are home", extra={"job": run.job, "attempt": run.attempt, "node": run.node})

    async def _compare(self, there: NodeOutputs, home: RunHome) -> None:
        names = home.pieced()
        if names:
            told = await there.hashes(names)
            for name in names:
                await to_the_end(partial(home.compare, name, told.get(name)))

    async def _fetch(self, run: Run, home: RunHome, wanted: Sequence[Wanted], *, is_final: bool) -> None:
        left = list(wanted)
        for part in packed(wanted, lambda one: one.file.name):
            await self._there(run).fetch(part, await to_the_end(partial(home.sink, part, is_final=is_final)))
            left = left[len(part) :]
            self._progress[run.key] = _less(self._progress.get(run.key, Progress()), left)

    # --- helpers -----------------------------------------------------------------------------------------------

    def _note(self, run: Run, listed: Sequence[OutputFile], wanted: Sequence[Wanted]) -> None:
        seen = Progress(len(listed), sum(file.size for file in listed))
        self._progress[run.key] = _less(seen, wanted)

    def _tell(self, run: Run, problem: str) -> None:
        before = self._progress.get(run.key, Progress())
        if before.problem != problem:
            log.warning("outputs stay behind: %.500s", problem, extra={"job": run.job, "node": run.node})
        known = (before.files, before.bytes, before.missing_files, before.missing_bytes)
        self._progress[run.key] = Progress(*known, problem=problem)

    def _there(self, run: Run) -> NodeOutputs:
        return NodeOutputs(self._node(run.node), self._identity, _CONNECT_S, run.job, run.attempt)

    def _home(self, run: Run) -> RunHome:
        return RunHome(attempt_folder(self._folder / str(run.job), run.attempt), run.node, is_first=run.is_first)

    def _transfer(self, run: Run) -> asyncio.Lock:
        return self._transfers.setdefault(run.key, asyncio.Lock())

    def _unfollow(self, run: Run) -> None:
        self._waiting.get(run.node, {}).pop(run.key, None)
        if (task := self._following.pop(run.key, None)) is not None:
            task.cancel()


def _choose(home: RunHome, listing: Listing, rule: ResultRule) -> Choice:
    """Counting what came before and is no longer there: what then has no place any more goes."""
    only_here = home.only_here(listing.files)
    choice = choose([*listing.files, *only_here], rule)
    gone = {file.name for file in only_here}
    for one in choice.left:
        home.drop(one.file.name)
    return Choice(
        tuple(file for file in choice.wanted if file.name not in gone),
        tuple(one for one in choice.left if one.file.name not in gone),
        choice.unsendable,
    )


def _missing(home: RunHome, choice: Choice) -> list[Wanted]:
    """What could not be read there was tried, and is told."""
    readable = (file for file in choice.wanted if file.name not in home.problems)
    return [one for one in map(home.wanted, readable) if one is not None]


def _less(seen: Progress, missing: Sequence[Wanted]) -> Progress:
    return Progress(seen.files, seen.bytes, len(missing), sum(one.file.size - one.offset for one in missing))


def _report(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (bug := task.exception()) is None:
        return
    if isinstance(bug, NotFound):  # its node is no longer one of ours
        log.info("%s are no longer looked at: %s", task.get_name(), bug)
    else:
        log.error("%s are no longer brought home", task.get_name(), exc_info=bug)
