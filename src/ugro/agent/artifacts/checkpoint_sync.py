"""Fetches checkpoints while a job runs, and puts them on the nodes of its next attempt.

The newest complete checkpoint of each job is kept here, whichever of its nodes wrote it: the next attempt resumes even
if that node is lost. Parts that several nodes write of one checkpoint are not assembled: let one rank write it, or use
a folder that the nodes share.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ugro.agent.artifacts.checkpoint_store import Checkpoint, CheckpointStore
from ugro.agent.artifacts.file_sync import FileTransfer, Polling
from ugro.agent.artifacts.job_folder import delete_results, link_checkpoint, resume_folder
from ugro.agent.artifacts.output_store import shown
from ugro.agent.support.aio import to_the_end
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.core.job import Job
from ugro.core.login import node_of
from ugro.core.support import clock
from ugro.core.support.moment import elapsed_s
from ugro.nodes.files import Found, Listing, NodeFiles, Prepared, Where, checkpoint_of
from ugro.nodes.node import Node
from ugro.nodes.runs import Identity
from ugro.remote.files.listing import RunFile, fingerprint
from ugro.remote.files.resumable import StreamError

log = logging.getLogger(__name__)

Tell = Callable[[Job, str], Awaitable[None]]

_LOOK_S = 2.0
_LONGEST_PAUSE_S = 60.0
_CONNECT_S = 3.0
_COLLECT_S = 300.0
_LOOKS = 3
_AGAIN_S = 1.5


@dataclass(frozen=True, slots=True)
class Offer:
    """A checkpoint that a node has."""

    node: str
    found: Found


@dataclass(frozen=True, slots=True)
class Collected:
    newest: Checkpoint | None
    problems: tuple[str, ...]  # what could not be fetched, one sentence each


@dataclass(frozen=True, slots=True)
class _Look:
    """At one node, or at all nodes of a job."""

    offers: tuple[Offer, ...] = ()
    problems: tuple[str, ...] = ()
    is_silent: bool = False  # a node could not be asked
    has_failed: bool = False  # a transfer failed


class CheckpointSync:
    def __init__(
        self, folder: Path, node: Callable[[str], Node], identity: Identity, tell: Tell | None = None
    ) -> None:
        """``folder`` has one for each job; ``node`` raises NotFound for one that is no longer known.

        ``tell`` notes a sentence about a job for its user.
        """
        self._tell = tell
        self._folder = folder
        self._node = node
        self._identity = identity
        self._polling: Polling[int] = Polling()
        self._reported: dict[int, set[str]] = {}

    def follow(self, job: Job, nodes: Sequence[str]) -> None:
        """Starts to fetch new ones, once per attempt, until they are collected or dropped."""
        pause_s = _LOOK_S

        async def look() -> float:
            nonlocal pause_s
            seen = await self._look(job, nodes)
            self._report(job, seen.problems)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2) if seen.has_failed else _LOOK_S
            return pause_s

        self._polling.start(job.id, f"checkpoints of job {job.id}, attempt {job.attempt}", look)

    async def collect(self, job: Job, nodes: Sequence[str], *, timeout_s: float = _COLLECT_S) -> Collected:
        """Fetches the newest that the reachable ones of these nodes have, or says why not. Ends the following."""
        problems: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                # After the transfer that is under way, and not instead of it: it may be almost complete.
                async with self._polling.lock(job.id):
                    self._polling.stop(job.id)
                    await self._fetch_newest(job, nodes, problems)
        except TimeoutError:
            problems.append(f"the newest checkpoint was not fetched within {timeout_s:g} s")
        finally:
            self._polling.stop(job.id)
        self._report(job, problems)
        return Collected(await self.newest(job.id), tuple(problems))

    async def newest(self, job: int) -> Checkpoint | None:
        return await asyncio.to_thread(self.newest_here, job)

    def newest_here(self, job: int) -> Checkpoint | None:
        """Blocks."""
        return self._store(job).newest()

    async def has_progressed(self, job: Job) -> bool:
        """Whether a newer one was fetched than its current attempt began from."""
        return await asyncio.to_thread(self._store(job.id).has_progressed, job.attempt)

    async def place(self, job: Job, node: str) -> Prepared:
        """Before the attempt starts there. However often it is called, all nodes of an attempt get the same one."""
        async with self._polling.lock(job.id):
            store, earlier = self._store(job.id), job.spec.earlier
            if earlier is not None and job.spec.retry.puts_back:
                adopted = await to_the_end(partial(store.adopt, self._store(earlier), job.attempt))
                if adopted is not None and self._tell is not None:
                    await self._tell(job, f"checkpoint {shown(os.fsencode(adopted.name))} of job {earlier} is put back")
            checkpoint = await asyncio.to_thread(store.begin, job.attempt)
        files, where = self._files(node), where_of(job)
        prepared = await files.prepare(where, checkpoint.found if checkpoint else None)
        await self._tell_of_older(job, node, prepared)
        if checkpoint is None or prepared.resume is not None:
            return prepared
        return await files.put(where, checkpoint.found, Path(checkpoint.path))

    async def _tell_of_older(self, job: Job, node: str, prepared: Prepared) -> None:
        told = self._reported.setdefault(job.id, set())
        names = ", ".join(shown(os.fsencode(name)) for name in prepared.older)
        text = f"{node_of(node)}: the job does not resume from what is older than itself in {prepared.dir}: {names}"
        if self._tell is not None and names and text not in told:
            told.add(text)
            await self._tell(job, f"{text} (one that is copied there from now on, without -p, counts)")

    async def drop_on(self, job: Job, nodes: Sequence[str]) -> tuple[str, ...]:
        """Deletes the job's folders on the nodes; what is here stays. Returns the nodes that could not be asked."""
        self._polling.stop(job.id)
        self._reported.pop(job.id, None)
        left = await asyncio.gather(*(self._drop_on(job, node) for node in nodes))
        await to_the_end(self._store(job.id).drop_incomplete)
        self._polling.forget(job.id)
        return tuple(node for node in left if node is not None)

    async def drop(self, job: int) -> None:
        """Fetches nothing more, and deletes what is here."""
        self._polling.stop(job)
        async with self._polling.lock(job):
            await to_the_end(partial(delete_results, self._folder / str(job)))

    async def close(self) -> None:
        await self._polling.close()

    # --- fetching ----------------------------------------------------------------------------------------------

    async def _fetch_newest(self, job: Job, nodes: Sequence[str], problems: list[str]) -> None:
        """``problems`` has those of the last look, also when this is cancelled."""
        for is_last in (*[False] * (_LOOKS - 1), True):
            look = await self._look(job, nodes)
            problems[:] = look.problems
            if is_last or not (look.has_failed or look.is_silent):
                return
            await asyncio.sleep(_AGAIN_S)  # a broken link is dialled again meanwhile

    async def _look(self, job: Job, nodes: Sequence[str]) -> _Look:
        """Fetches the newest of all nodes; if that fails, the next best."""
        store = self._store(job.id)
        looks = await asyncio.gather(*(self._ask(job, node) for node in nodes))
        offers = [offer for look in looks for offer in look.offers]
        problems = [problem for look in looks for problem in look.problems]
        has_failed = False
        newest = await asyncio.to_thread(store.newest)
        while (offer := choose(offers, newest)) is not None:
            try:
                newest = await self._fetch(job, offer, store)
            except (UgroError, OSError) as error:
                has_failed = True
                problems.append(str(error))
                offers.remove(offer)
        return _Look((), tuple(problems), any(look.is_silent for look in looks), has_failed)

    async def _ask(self, job: Job, node: str) -> _Look:
        try:
            found = await self._files(node).newest(where_of(job))
        except (Unreachable, TimedOut) as error:
            return _Look(problems=(str(error),), is_silent=True)
        except (RemoteFailure, NotFound) as error:
            return _Look(problems=(str(error),))
        offers = tuple(self._offer(job, node, one) for one in found if one.problem is None)
        problems = (f"{node}: checkpoint {one.name}: {one.problem:.300}" for one in found if one.problem is not None)
        return _Look(offers, tuple(problems))

    def _offer(self, job: Job, node: str, found: Found) -> Offer:
        """With the time of its change by our clock: that of the node may be hours off."""
        off_ns = int((self._node(node).quality.clock_offset_s or 0.0) * 1e9)
        attempt = min(found.attempt, job.attempt)
        return Offer(node, replace(found, changed_ns=found.changed_ns - off_ns, attempt=attempt))

    async def _fetch(self, job: Job, offer: Offer, store: CheckpointStore) -> Checkpoint:
        found = offer.found
        arriving = await to_the_end(partial(store.arriving, found))
        listed: list[RunFile] = []

        def unchanged(listing: Listing) -> Sequence[RunFile]:
            listed[:] = listing.files
            if fingerprint(listed) != found.fingerprint:
                raise _failure(offer, "it changed; give a checkpoint its name when it is complete", "changed")
            return listed

        await FileTransfer(self._files(offer.node), checkpoint_of(where_of(job), found), arriving).fetch_all(unchanged)
        if arriving.problems:
            raise _failure(offer, next(iter(arriving.problems.values())), "changed")
        try:
            settled = await to_the_end(partial(store.settle, listed, found, offer.node, job.attempt))
        except StreamError as error:
            raise _failure(offer, str(error), "damaged") from error
        await to_the_end(partial(link_checkpoint, self._folder / str(job.id), found.name, settled.file or settled.path))
        extra = {"job": job.id, "node": offer.node, "bytes": found.bytes}
        log.info("fetched checkpoint %s", found.name, extra=extra)
        return settled

    # --- helpers -----------------------------------------------------------------------------------------------

    async def _drop_on(self, job: Job, node: str) -> str | None:
        try:
            await self._files(node).drop_checkpoints(where_of(job))
        except NotFound:
            return None
        except (Unreachable, TimedOut, RemoteFailure) as error:
            log.info("checkpoints stay on the node for now: %s", error, extra={"job": job.id, "node": node})
            return node
        return None

    def _files(self, node: str) -> NodeFiles:
        return NodeFiles(self._node(node), self._identity, _CONNECT_S)

    def _store(self, job: int) -> CheckpointStore:
        return CheckpointStore(resume_folder(self._folder / str(job)))

    def _report(self, job: Job, problems: Sequence[str]) -> None:
        """Each once for a job: it is looked at every few seconds."""
        reported = self._reported.setdefault(job.id, set())
        for problem in problems:
            if problem not in reported:
                reported.add(problem)
                log.warning("a checkpoint was not fetched: %.500s", problem, extra={"job": job.id})


def choose(offers: Sequence[Offer], newest: Checkpoint | None) -> Offer | None:
    """The newest that is newer than what is here; of equal ones that of the first node."""
    newer = [offer for offer in offers if newest is None or is_newer(offer, newest)]
    return max(newer, key=lambda offer: _order(offer.found), default=None)


def is_newer(offer: Offer, newest: Checkpoint) -> bool:
    """The same number from another node is a copy of the same step; from the same node, it was written again."""
    found = offer.found
    if found.fingerprint == newest.found.fingerprint and found.name == newest.name:
        return False
    if found.number is not None and found.number == newest.number and offer.node != newest.node:
        return False
    own, known = _order(found), (*_order(newest.found)[:1], newest.found.attempt or newest.attempt)
    if own[:2] != known:
        return own[:2] > known
    if offer.node == newest.node and found.serial and newest.found.serial:
        return found.serial > newest.found.serial
    return found.changed_ns > newest.found.changed_ns


def _order(found: Found) -> tuple[int, int, int]:
    """By the number in its name, then by the attempt that wrote it; only then by time."""
    return (-1 if found.number is None else found.number, found.attempt, found.changed_ns)


def where_of(job: Job, attempt: int | None = None) -> Where:
    """In an attempt at the job; without one in its newest."""
    spec, age_s = job.spec, elapsed_s(job.submitted, clock.now())
    return Where(job.id, spec.checkpoint.dir, spec.cwd, age_s, max(1, attempt or job.attempt))


def _failure(offer: Offer, text: str, cause: str) -> RemoteFailure:
    return RemoteFailure(f"checkpoint {offer.found.name}: {text}", subject=offer.node, cause=cause)
