"""Fetches checkpoints while a job runs, and puts them on the nodes of its next attempt.

The newest complete checkpoint of each job is kept here, whichever of its nodes wrote it: the next attempt resumes even
if that node is lost. Parts that several nodes write of one checkpoint are not assembled: let one rank write it, or use
a folder that the nodes share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from ugro.kernel.access.model import node_of
from ugro.kernel.files.node_files import Found, Listing, NodeFiles, Prepared, Where, checkpoint_of
from ugro.kernel.files.results.file_store import FileStore, FileTransfer, Polling, expect_room, sync_file_system
from ugro.kernel.files.results.job_folder import delete_results, link_checkpoint, resume_folder
from ugro.kernel.files.results.output_store import shown
from ugro.kernel.jobs.model import Job
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.support import moments as clock
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.support.moments import elapsed_s
from ugro.node import durable
from ugro.node.files import listing
from ugro.node.files import transfer as received
from ugro.node.files.listing import RunFile, Unsendable, fingerprint
from ugro.node.files.transfer import StreamError

# --- checkpoints kept here --------------------------------------------------------------------------------------------
# What a job can resume from, and what each attempt began from: complete, or not there.
#
# ``jobs/<id>/.checkpoints/`` has a folder for each checkpoint, numbered in the order of arrival: the highest is the
# newest. In it are ``content`` (the content of a folder, or the one file) and ``record.json``. What is called
# ``.arriving.<fingerprint>`` is incomplete; the next transfer of the same checkpoint continues it. ``attempt_N.json``
# says what attempt N began from: it is written once, so that all nodes of the attempt get the same checkpoint even if a
# newer one arrives while they start. Files that are results are apart from these (``output_store``).


_ARRIVING = ".arriving."
_REMOVING = ".removing."
_FILES = "files"  # the name of its journal


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was fetched."""

    serial: int
    found: Found
    node: str  # where it was written
    attempt: int  # in which it was fetched
    kept: str  # its fingerprint here: some file systems store times less exactly than others
    path: str  # of its content

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def number(self) -> int | None:
        return self.found.number

    @property
    def bytes(self) -> int:
        return self.found.bytes

    @property
    def file(self) -> str | None:
        """The path of one that is a file."""
        return f"{self.path}/{self.name}" if self.found.kind == "file" else None


def files_of(checkpoint: Checkpoint, folder: str) -> dict[bytes, Path]:
    """Its files here by their names among the results, in the folder of the checkpoints. Blocks."""
    root = Path(checkpoint.path)
    prefix = folder if checkpoint.file is not None else f"{folder}/{checkpoint.name}"
    found = ((os.path.relpath(path, root), path) for path in root.rglob("*") if path.is_file())
    return {os.fsencode(f"{prefix}/{name}"): path for name, path in found}


@dataclass(frozen=True, slots=True)
class _Begun:
    serial: int | None  # None: it began from scratch


class CheckpointStore:
    """Of one job. Not async: call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Checkpoint | None:
        for serial in sorted(self._serials(), reverse=True):
            if (found := self._read(serial)) is not None:
                return found
        return None

    def arriving(self, found: Found) -> FileStore:
        """For the files of one that is fetched, with those already here. Other incomplete ones are deleted."""
        folder = self._arriving(found)
        self._remove_all(_ARRIVING, _REMOVING, but=folder.name)
        (folder / "content").mkdir(mode=0o700, parents=True, exist_ok=True)
        expect_room(self._folder, found.bytes - _size(folder))
        return FileStore(folder / "content", folder, _FILES)

    def settle(self, files: Sequence[RunFile], found: Found, node: str, attempt: int) -> Checkpoint:
        """All files are here: from now on it is the newest. Only then older ones are deleted."""
        folder = self._arriving(found)
        received.expect_same(str(folder / "content"), files)
        sync_file_system(folder)
        serial = max(self._serials(), default=0) + 1
        place = self._folder / str(serial)
        settled = Checkpoint(serial, found, node, attempt, _fingerprint(folder / "content"), str(place / "content"))
        FileStore(folder / "content", folder, _FILES).drop_state()
        durable.write_json(str(folder / "record.json"), asdict(settled))
        folder.rename(place)
        durable.sync_folder(str(self._folder))
        self._prune()
        return settled

    def drop_incomplete(self) -> None:
        self._remove_all(_ARRIVING)

    def adopt(self, earlier: CheckpointStore, attempt: int) -> Checkpoint | None:
        """Takes over the newest of another job, for an attempt that has not begun, unless there is one here."""
        theirs = earlier.newest() if self._begun(attempt) is None and self.newest() is None else None
        if theirs is None:
            return None
        self._remove_all(_ARRIVING)
        fresh, place = self._folder / f"{_ARRIVING}adopted", self._folder / "1"
        fresh.mkdir(mode=0o700, parents=True)
        shutil.copytree(theirs.path, fresh / "content", copy_function=os.link)
        found = replace(theirs.found, attempt=0, serial=0)  # what this job writes is newer
        kept = _fingerprint(fresh / "content")
        own = Checkpoint(1, found, theirs.node, 0, kept, str(place / "content"))
        durable.write_json(str(fresh / "record.json"), asdict(own))
        fresh.rename(place)
        durable.sync_folder(str(self._folder))
        return own

    def begin(self, attempt: int) -> Checkpoint | None:
        """What the attempt resumes from; None if it begins from scratch. Decided by the first call."""
        begun = self._begun(attempt)
        if begun is None:
            newest = self.newest()
            begun = _Begun(newest.serial if newest else None)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            durable.write_json(str(self._attempt_file(attempt)), asdict(begun))
            self._prune()
        if begun.serial is None:
            return None
        if (checkpoint := self._read(begun.serial)) is None:
            place = self._folder / str(begun.serial)
            raise NotFound(f"what attempt {attempt} resumes from was changed or deleted", hint=f"it was in {place}")
        return checkpoint

    def has_progressed(self, attempt: int) -> bool:
        """Whether one arrived that is newer than what the attempt began from."""
        begun, newest = self._begun(attempt), self.newest()
        return newest is not None and begun is not None and newest.serial > (begun.serial or 0)

    # --- files -------------------------------------------------------------------------------------------------

    def _arriving(self, found: Found) -> Path:
        return self._folder / (_ARRIVING + found.fingerprint)

    def _serials(self) -> list[int]:
        return [int(name) for name in self._names() if name.isascii() and name.isdigit()]

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except FileNotFoundError:
            return []

    def _read(self, serial: int) -> Checkpoint | None:
        """None when it is not what was fetched."""
        content = self._folder / str(serial) / "content"
        try:
            found = decode(Checkpoint, durable.read_json(str(content.parent / "record.json")))
            return found if _fingerprint(content) == found.kept else None
        except (DecodeError, OSError, Unsendable):
            return None

    def _attempt_file(self, attempt: int) -> Path:
        return self._folder / f"attempt_{attempt}.json"

    def _begun(self, attempt: int) -> _Begun | None:
        try:
            return decode(_Begun, json.loads(self._attempt_file(attempt).read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def _prune(self) -> None:
        """Keeps the newest, and what the latest attempt began from: some of its nodes may still need it."""
        attempts = [int(name[8:-5]) for name in self._names() if name.startswith("attempt_") and name[8:-5].isdigit()]
        begun = self._begun(max(attempts)) if attempts else None
        newest = self.newest()
        keep = {newest.serial if newest else None, begun.serial if begun else None}
        for serial in set(self._serials()) - keep:
            (self._folder / str(serial)).rename(self._folder / (_REMOVING + secrets.token_hex(4)))
        for attempt in attempts:
            if attempt < max(attempts):
                self._attempt_file(attempt).unlink(missing_ok=True)
        self._remove_all(_REMOVING)

    def _remove_all(self, *marks: str, but: str = "") -> None:
        for name in self._names():
            if name.startswith(marks) and name != but:
                shutil.rmtree(self._folder / name, ignore_errors=True)


def _fingerprint(content: Path) -> str:
    return listing.fingerprint(listing.files_of(str(content)))


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


# --- fetching and putting checkpoints ---------------------------------------------------------------------------------


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
