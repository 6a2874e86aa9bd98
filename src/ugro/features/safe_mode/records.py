"""The records beside the state: key, mark and journal. They show whether the state is the newest one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ugro.features.safe_mode.model import Mark
from ugro.features.safe_mode.rules import Entry, older_than_journal, older_than_mark
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import HOLDING_STATES, Ending, Job, JobState
from ugro.kernel.store.backup import write_whole
from ugro.kernel.store.standing import Numbers
from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.quantities import count_of
from ugro.kernel.support.secrets import KEY_BYTES, sealed, unsealed
from ugro.kernel.support.state_dir import StateDir

# --- journal ----------------------------------------------------------------------------------------------------------
# The journal: for every job its newest attempt and how it ended, in a file beside the state.
#
# Written after each durable change and before anybody acts on it, so it is never ahead of the state, unless an older
# state was put back. A slot of fixed size per job: what a change costs is one small write, without a sync.


log = logging.getLogger(__name__)

_SLOT = struct.Struct("<IIBBH")
_SUM = struct.Struct("<I")
_BYTES = _SLOT.size + _SUM.size
_MOST = 10**8  # as on nodes: an id beyond it has no slot
_READ_SLOTS = 65536
# In the file by their place here: only ever extended at the end.
_STATES = tuple(JobState(word) for word in (
    "queued", "starting", "running", "unreachable", "stopping", "recovering", "succeeded", "failed", "cancelled",
))  # fmt: skip
_ENDINGS = (None, *(Ending(word) for word in (
    "done", "failed", "cancelled", "time_limit", "preempted", "owner_is_back",
)))  # fmt: skip
_STATE_NUMBERS = {state: number for number, state in enumerate(_STATES)}
_ENDING_NUMBERS = {ending: number for number, ending in enumerate(_ENDINGS)}


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self, agent: str) -> bool:
        """False: there is none of this agent. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC, 0o600)
            if os.pread(self._descriptor, _BYTES, 0) == _owner(agent):
                return True
            self.close()
        return False

    def create(self, agent: str) -> None:
        """If there is none of this agent; another's is set aside. Blocks."""
        if self._descriptor is not None:
            return
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(self._path.with_name(f"{self._path.name}.{time.time():.0f}"))
        # After a power cut, too, it is known whose it is: without that, the state could not be told from an older one.
        write_whole(self._path, _owner(agent))
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def note(self, job: Job) -> None:
        """If that fails, an older state may not be recognized; the state itself is as it should be."""
        if self._descriptor is None or job.id >= _MOST:
            return
        slot = _SLOT.pack(job.id, job.attempt, _STATE_NUMBERS[job.state], _ENDING_NUMBERS[job.ending], 0)
        try:
            os.pwrite(self._descriptor, slot + _SUM.pack(zlib.crc32(slot)), job.id * _BYTES)
        except OSError as error:
            log.warning("the journal cannot be written: %s", error, extra={"job": job.id})

    @property
    def highest(self) -> int:
        """No job with a higher id was noted."""
        return 0 if self._descriptor is None else max(0, os.fstat(self._descriptor).st_size // _BYTES - 1)

    def get(self, job: int) -> Entry | None:
        if self._descriptor is None or not 0 < job < _MOST:
            return None
        return _entry(os.pread(self._descriptor, _BYTES, job * _BYTES), job)

    def after(self, job: int) -> Iterator[tuple[int, Entry]]:
        """Those with a higher id. Blocks."""
        first = job + 1
        while self._descriptor is not None and (
            content := os.pread(self._descriptor, _READ_SLOTS * _BYTES, first * _BYTES)
        ):
            for place in range(0, len(content), _BYTES):
                number = first + place // _BYTES
                if (entry := _entry(content[place : place + _BYTES], number)) is not None:
                    yield number, entry
            first += _READ_SLOTS


def _owner(agent: str) -> bytes:
    """In the first slot: no job has the id 0."""
    return agent.encode()[:_BYTES].ljust(_BYTES, b"-")


def _entry(slot: bytes, job: int) -> Entry | None:
    """None for a slot that was never written, or of which a power cut left a part."""
    if len(slot) < _BYTES or _SUM.unpack_from(slot, _SLOT.size)[0] != zlib.crc32(slot[: _SLOT.size]):
        return None
    number, attempt, state, ending, _ = _SLOT.unpack_from(slot)
    if number != job or state >= len(_STATES) or ending >= len(_ENDINGS):
        return None
    return Entry(attempt, _STATES[state], _ENDINGS[ending])


# --- key --------------------------------------------------------------------------------------------------------------
# The agent's key: random bytes beside the state, made once. With it the agent seals what it leaves on nodes.


def agent_key(path: Path) -> bytes:
    """Without the file a new key is made: marks and tickets that the old one sealed are then not believed. Blocks."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
        log.error("%s is damaged; a new key is made, and what the old one sealed is not believed any more", path)
    key = secrets.token_bytes(KEY_BYTES)
    write_whole(path, key)
    return key


# --- mark -------------------------------------------------------------------------------------------------------------
# Marks: how far the state has come, sealed, on every node and in a file beside the state.


def write_mark(key: bytes, mark: Mark) -> str:
    return sealed(key, dumps(mark))


def read_mark(key: bytes, agent: str, message: object) -> Mark | None:
    """None for one that is not proven to be ours: it shows nothing."""
    text = unsealed(key, message)
    if text is None:
        return None
    with contextlib.suppress(ValueError, DecodeError):
        mark = decode(Mark, json.loads(text))
        return mark if mark.agent == agent else None
    return None


class MarkFile:
    def __init__(self, path: Path, key: bytes) -> None:
        self._path = path
        self._key = key

    def read(self, agent: str) -> Mark | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return read_mark(self._key, agent, self._path.read_text())
        return None

    def write(self, mark: Mark) -> None:
        """Lasts when this returns. Blocks."""
        write_whole(self._path, write_mark(self._key, mark).encode())


# --- records ----------------------------------------------------------------------------------------------------------


HERE = "this machine"


@dataclass(frozen=True, slots=True)
class Comparison:
    """``reasons``: why the state is an older one. ``is_checked``: False: there is nothing to compare it with."""

    reasons: tuple[str, ...] = ()
    mark: Mark | None = None
    is_checked: bool = True
    is_moved: bool = False  # the state was last used on another machine, or in another folder


class Records:
    def __init__(self, home: StateDir) -> None:
        self._home = home
        self.key = agent_key(home.key)
        self._mark_file = MarkFile(home.mark, self.key)
        self.journal = Journal(home.journal)
        self._agent = ""
        self._complaint = ""
        self.place = _place(home)
        self.is_complete = True  # False: they were lost, and do not tell what came after the state was saved

    def compare(self, agent: str, numbers: Numbers, live: Sequence[Job], *, is_moved: bool = False) -> Comparison:
        """With the state as it was found. Records that came with it are as old as it is. Blocks."""
        self._agent = agent
        mark = self._mark_file.read(agent)
        has_journal = self.journal.open(agent)
        if not numbers.reserved and mark is None:  # a new state
            return Comparison()
        self.is_complete = has_journal and mark is not None and not is_moved
        if mark is None or not has_journal:
            return Comparison(is_checked=False, mark=mark, is_moved=is_moved)
        own = Mark(agent, numbers.generation, numbers.reserved)
        reasons = [*self._beyond(numbers, live), *older_than_mark(own, mark, HERE)]
        return Comparison(tuple(reasons), mark, is_checked=not is_moved, is_moved=is_moved)

    def newer_entries(
        self, numbers: Numbers, live: Sequence[Job], found: Iterable[int] = ()
    ) -> Iterator[tuple[int, Entry]]:
        """Of jobs that came further than the state says. ``found``: jobs that nodes have and it does not. Blocks."""
        yield from self.journal.after(numbers.highest)
        for number in found:  # also of ids that an earlier decision has left out
            if (entry := self.journal.get(number)) is not None:
                yield number, entry
        for job in live:
            entry = self.journal.get(job.id)
            if entry is not None and older_than_journal(job, entry):
                yield job.id, entry

    def write(self, mark: Mark) -> bool:
        """The state is the newest, and from now on recorded. If that fails, an older one may go unnoticed. Blocks."""
        try:
            self.journal.create(self._agent)
            self._mark_file.write(mark)
        except OSError as error:
            if str(error) != self._complaint:  # each once: it is tried again
                log.error("the records beside the state cannot be written: %s", error)
            self._complaint = str(error)
            return False
        self.is_complete, self._complaint = True, ""
        return True

    @property
    def highest(self) -> int:
        """The highest id of which this machine has a trace: a folder of files, or an entry of the journal. Blocks."""
        return max(_highest(self._home.jobs), self.journal.highest)

    def close(self) -> None:
        self.journal.close()

    def _beyond(self, numbers: Numbers, live: Sequence[Job]) -> Iterator[str]:
        newer = [job for job, _ in self.newer_entries(numbers, live)]
        if newer:
            jobs = count_of(len(newer), "job")
            yield f"{HERE} has a record of {jobs} newer than the state (job {max(newer)} is the newest)"


def _place(home: StateDir) -> str:
    """Where a state is used: this machine and folder. Containers have no id, and a host name that says nothing."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = ""
    return f"{machine}:{os.path.realpath(home.path)}"


def _highest(folder: Path) -> int:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return 0
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)


# --- traces -----------------------------------------------------------------------------------------------------------
# What nodes remember of jobs whose runs are gone: by their fences, which attempts ever came to them.
#
# Fences carry no seal. So they count only where nothing else can tell: after a move, and when the user decides.


_AT_ONCE = 500


async def newest_attempts(
    watch: RunTracker, nodes: Iterable[str], jobs: Collection[int]
) -> tuple[dict[int, int], set[str]]:
    """By job, the newest attempt that ever came to one of the nodes; and the nodes that could not say it."""
    newest: dict[int, int] = {}
    silent: set[str] = set()
    wanted = sorted(jobs)
    for node in nodes:
        for first in range(0, len(wanted), _AT_ONCE):
            found = await _on_node(watch, node, wanted[first : first + _AT_ONCE])
            if found is None:
                silent.add(node)
                break
            for job, attempt in found.items():
                newest[job] = max(attempt, newest.get(job, 0))
    return newest, silent


def ended_since(watch: RunTracker, live: Sequence[Job], newest: Mapping[int, int]) -> dict[int, int]:
    """Of jobs that the state has as waiting or running: those that nodes have run to an end since, by attempt.

    ``newest``: by job, the newest attempt that ever came to a node.
    """
    # A run that came and is gone was removed, and that is done when its end is recorded.
    return {
        job.id: attempt
        for job in live
        if (attempt := newest.get(job.id, 0)) > job.attempt
        or (attempt == job.attempt and job.state in HOLDING_STATES and is_gone(watch, job))
    }


def is_gone(watch: RunTracker, job: Job) -> bool:
    """Every node of it answers, and none has a trace of it."""
    nodes = job.placement.nodes if job.placement else ()
    reached = all(watch.state(node, job.id, job.attempt).is_reachable for node in nodes)
    return reached and all(watch.status(node, job.id, job.attempt) is None for node in nodes)


async def _on_node(watch: RunTracker, node: str, jobs: Sequence[int]) -> Mapping[int, int] | None:
    try:
        return (await watch.runs(node).tickets([], jobs)).started
    except UgroError as error:
        log.warning("the node cannot say which jobs it ran: %s", error, extra={"node": node})
        return None
