"""Checkpoints come home while a job runs, and go to the nodes of its next attempt: also when who wrote them is lost.

The newest complete one of each job is kept at home, whichever of its nodes wrote it. One that several nodes write
together, a part each, is not put together: let one rank write it, or use a folder that the nodes share.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ugro.agent.artifacts.checkpoint_store import Checkpoint, CheckpointHome
from ugro.agent.artifacts.job_folder import delete_results
from ugro.agent.support.aio import to_the_end
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.core.job import Job
from ugro.core.support.moment import unix_seconds
from ugro.nodes.checkpoints import Found, NodeCheckpoints, Where
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity

log = logging.getLogger(__name__)

_LOOK_S = 2.0
_LONGEST_PAUSE_S = 60.0
_CONNECT_S = 3.0
_COLLECT_S = 300.0
_LOOKS = 3
_AGAIN_S = 1.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node has."""

    node: str
    found: Found


@dataclass(frozen=True, slots=True)
class Collected:
    newest: Checkpoint | None
    problems: tuple[str, ...]  # what could not be had, one sentence each


@dataclass(frozen=True, slots=True)
class Placed:
    """Where an attempt writes and resumes on a node."""

    dir: str
    resume: str | None

    @property
    def env(self) -> dict[str, str]:
        resume = {"UGRO_RESUME_DIR": self.resume} if self.resume else {}
        return {"UGRO_CHECKPOINT_DIR": self.dir, **resume}


@dataclass(frozen=True, slots=True)
class _Answer:
    """Of one node."""

    offers: tuple[Offer, ...] = ()
    problems: tuple[str, ...] = ()
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look at all nodes could not do."""

    problems: tuple[str, ...]
    has_failed: bool  # a transfer, and not only a question
    has_silent: bool  # a node could not be asked


@dataclass(frozen=True, slots=True)
class _Following:
    attempt: int
    task: asyncio.Task[None]


class Checkpoints:
    def __init__(self, folder: Path, node: Callable[[str], Node], identity: Identity) -> None:
        """``folder`` holds one for each job; ``node`` raises NotFound for one that is no longer known."""
        self._folder = folder
        self._node = node
        self._identity = identity
        self._following: dict[int, _Following] = {}
        self._transfers: dict[int, asyncio.Lock] = {}  # one at a time for each job
        self._told: dict[int, set[str]] = {}

    def follow(self, job: Job, nodes: Sequence[str]) -> None:
        """Begins to bring new ones home, or goes on: once per attempt, until it is collected or forgotten."""
        current = self._following.get(job.id)
        if current is not None and current.attempt == job.attempt:
            return
        self._unfollow(job.id)
        name = f"checkpoints of job {job.id}, attempt {job.attempt}"
        task = asyncio.create_task(self._keep_bringing(job, tuple(nodes)), name=name)
        task.add_done_callback(_report)
        self._following[job.id] = _Following(job.attempt, task)

    async def collect(self, job: Job, nodes: Sequence[str], *, timeout_s: float = _COLLECT_S) -> Collected:
        """The newest that the reachable ones of these nodes have is home, or it is said why not. Ends the following."""
        problems: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                # Behind what is being transferred now, and not instead of it: most of that may be here already.
                async with self._transfer(job.id):
                    self._unfollow(job.id)
                    await self._bring_newest(job, nodes, problems)
        except TimeoutError:
            problems.append(f"its newest checkpoint was not home within {timeout_s:g} s")
        finally:
            self._unfollow(job.id)
        self._tell(job, problems)
        return Collected(await self.newest(job.id), tuple(problems))

    async def newest(self, job: int) -> Checkpoint | None:
        return await asyncio.to_thread(self._home(job).newest)

    async def has_progressed(self, job: Job) -> bool:
        """Whether a newer one came home than its current attempt began from."""
        return await asyncio.to_thread(self._home(job.id).has_progressed, job.attempt)

    async def place(self, job: Job, node: str) -> Placed:
        """Before the attempt starts there. Asked again for the same attempt, every node gets the same checkpoint."""
        async with self._transfer(job.id):
            checkpoint = await asyncio.to_thread(self._home(job.id).begin, job.attempt)
        there, where = self._there(node), _where(job)
        prepared = await there.prepare(where, checkpoint.found if checkpoint else None)
        if checkpoint is None or prepared.resume is not None:
            return Placed(prepared.dir, prepared.resume)
        return Placed(prepared.dir, await there.put(where, checkpoint.found, Path(checkpoint.path)))

    async def forget(self, job: Job, nodes: Sequence[str]) -> tuple[str, ...]:
        """Deletes the job's folders on the nodes; what is home stays. Returns the nodes that could not be asked."""
        self._unfollow(job.id)
        self._told.pop(job.id, None)
        left = await asyncio.gather(*(self._forget_on(job, node) for node in nodes))
        self._transfers.pop(job.id, None)
        return tuple(node for node in left if node is not None)

    async def drop(self, job: int) -> None:
        """Nothing more of it comes, and what is home goes."""
        self._unfollow(job)
        async with self._transfer(job):
            await to_the_end(partial(delete_results, self._folder / str(job)))

    async def close(self) -> None:
        tasks = [following.task for following in self._following.values()]
        for job in list(self._following):
            self._unfollow(job)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- bringing them home ------------------------------------------------------------------------------------

    async def _keep_bringing(self, job: Job, nodes: tuple[str, ...]) -> None:
        pause_s = _LOOK_S
        while True:
            began = asyncio.get_running_loop().time()
            async with self._transfer(job.id):
                look = await self._bring(job, nodes)
            self._tell(job, look.problems)
            took_s = asyncio.get_running_loop().time() - began
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2) if look.has_failed else _LOOK_S
            # As long as the transfer took: the network is there for the training, too.
            await asyncio.sleep(max(pause_s * random.uniform(0.75, 1.25), took_s))

    async def _bring_newest(self, job: Job, nodes: Sequence[str], problems: list[str]) -> None:
        """``problems`` holds those of the last look, also when this is cut short."""
        for is_last in (*[False] * (_LOOKS - 1), True):
            look = await self._bring(job, nodes)
            problems[:] = look.problems
            if is_last or not (look.has_failed or look.has_silent):
                return
            await asyncio.sleep(_AGAIN_S)  # a link that broke is dialled again by then

    async def _bring(self, job: Job, nodes: Sequence[str]) -> _Look:
        """One look at all nodes. Should the best of them fail on the way, the next best is taken."""
        home = self._home(job.id)
        answers = await asyncio.gather(*(self._ask(job, node) for node in nodes))
        offers = [offer for answer in answers for offer in answer.offers]
        problems = [problem for answer in answers for problem in answer.problems]
        has_failed = False
        newest = await asyncio.to_thread(home.newest)
        while (offer := choose(offers, newest)) is not None:
            try:
                newest = await self._fetch(job, offer, home)
            except (UgroError, OSError) as error:
                has_failed = True
                problems.append(str(error))
                offers.remove(offer)
        return _Look(tuple(problems), has_failed, any(answer.is_silent for answer in answers))

    async def _ask(self, job: Job, node: str) -> _Answer:
        try:
            found = await self._there(node).newest(_where(job))
        except (Unreachable, TimedOut) as error:
            return _Answer(problems=(str(error),), is_silent=True)
        except (RemoteFailure, NotFound) as error:
            return _Answer(problems=(str(error),))
        offers = tuple(Offer(node, one) for one in found if one.problem is None)
        return _Answer(offers, tuple(_sentence(node, one) for one in found if one.problem is not None))

    async def _fetch(self, job: Job, offer: Offer, home: CheckpointHome) -> Checkpoint:
        folder = await to_the_end(partial(home.arriving, offer.found))
        is_whole = False
        try:
            await self._there(offer.node).fetch(_where(job), offer.found, folder)
            is_whole = True
        finally:
            if not is_whole:
                await to_the_end(partial(home.discard, folder))
        settled = await to_the_end(partial(home.settle, folder, offer.found, offer.node, job.attempt))
        extra = {"job": job.id, "node": offer.node, "bytes": offer.found.bytes}
        log.info("checkpoint %s is home", offer.found.name, extra=extra)
        return settled

    # --- helpers -----------------------------------------------------------------------------------------------

    async def _forget_on(self, job: Job, node: str) -> str | None:
        try:
            await self._there(node).forget(_where(job))
        except NotFound:
            return None
        except (Unreachable, TimedOut, RemoteFailure) as error:
            log.info("its checkpoints stay for now: %s", error, extra={"job": job.id, "node": node})
            return node
        return None

    def _there(self, node: str) -> NodeCheckpoints:
        return NodeCheckpoints(self._node(node), self._identity, _CONNECT_S)

    def _home(self, job: int) -> CheckpointHome:
        return CheckpointHome(self._folder / str(job) / "checkpoints")

    def _transfer(self, job: int) -> asyncio.Lock:
        return self._transfers.setdefault(job, asyncio.Lock())

    def _unfollow(self, job: int) -> None:
        following = self._following.pop(job, None)
        if following is not None:
            following.task.cancel()

    def _tell(self, job: Job, problems: Sequence[str]) -> None:
        """Each once for a job: it is looked at every few seconds."""
        told = self._told.setdefault(job.id, set())
        for problem in problems:
            if problem not in told:
                told.add(problem)
                log.warning("a checkpoint stays behind: %.500s", problem, extra={"job": job.id})


def choose(offers: Sequence[Offer], home: Checkpoint | None) -> Offer | None:
    """The newest that is newer than what is home; of equal ones the first node's."""
    newer = [offer for offer in offers if home is None or is_newer(offer, home)]
    return max(newer, key=lambda offer: _order(offer.found), default=None)


def is_newer(offer: Offer, home: Checkpoint) -> bool:
    """The same number from another node is the same step once more, not news; from the same, it was written again."""
    found = offer.found
    if found.fingerprint == home.found.fingerprint and found.name == home.name:
        return False
    if found.number is not None and found.number == home.number and offer.node != home.node:
        return False
    return _order(found) > _order(home.found)


def _order(found: Found) -> tuple[int, int]:
    return (-1 if found.number is None else found.number, found.changed_ns)


def _where(job: Job) -> Where:
    since = unix_seconds(job.submitted_at)
    return Where(job.id, job.spec.checkpoint.dir, job.spec.cwd, since)


def _sentence(node: str, found: Found) -> str:
    return f"{node}: checkpoint {found.name}: {found.problem:.300}"


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (bug := task.exception()) is not None:
        log.error("%s are no longer brought home", task.get_name(), exc_info=bug)
