"""A run as a keeper begins it: a fresh one, of one rank and without a lease, in one go under its fence.

The same guards, files and order as for any run (``starting``, ``supervisor``). Where anything is there already, or has
to be waited for, nothing is done and ``TakesTime`` says so: then the run gets a supervisor of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from typing import Any, Dict, Iterator, List, NamedTuple

from ugro.remote.batch import dir_pool as blank
from ugro.remote.cas import contents
from ugro.remote.clock import boot_id
from ugro.remote.files.capped_log import CappedLog
from ugro.remote.program import Refused
from ugro.remote.runs.ranks import NotStarted, Rank
from ugro.remote.runs.run_state import RunLife
from ugro.remote.state.fence import Fence
from ugro.remote.state.rundir import VERSION, RunDir, new_envelope, point
from ugro.remote.state.runspec import RunSpec

_SPARE = 2
_MOST_FILES = 100  # of code; a keeper that is busy with more keeps its other runs waiting
_MOST_OLDER = 8  # attempts before this one; more are left to whoever has the time
_encode = json.JSONEncoder().encode


class TakesTime(Exception):
    """It has to be waited for, or looked at closely."""


class Wanted(NamedTuple):
    """What a node program hands over."""

    number: int
    job: str
    attempt: int
    spec: Dict[str, Any]
    is_of_this_boot: bool
    blank: str  # empty: none is at hand


class Claimed(NamedTuple):
    run: RunDir
    spec: RunSpec
    spec_hash: str
    lock: int


class Desk:
    """Where a keeper has its own things: its folder, and what all of its runs have in common."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder = folder
        self.name = name
        self._count = 0
        self._spare: List[str] = []
        self._boot = os.path.join(folder, "boot")
        with open(self._boot, "w", encoding="ascii") as file:
            file.write(boot_id())

    def claim(self, run: RunDir, wanted: Wanted) -> Claimed:
        """When this returns, the run is ours to start, and its lock is held."""
        spec = RunSpec(wanted.spec)
        if spec.ranks[0].number != 0:  # a blank has a log for rank 0
            raise TakesTime
        point("keeper.admitted")
        with _entered(run) as fence:
            point("keeper.fenced")
            path = wanted.blank if os.path.isdir(wanted.blank) else self._blank()
            point("keeper.made")
            document = new_envelope(wanted.spec, None, wanted.is_of_this_boot, run=run.name, keeper=self.name)
            blank.write(path + "/spec.json", _encode(document).encode())
            blank.reserve(path)
            lock = os.open(path + "/lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                point("keeper.locked")
                self._fill(path, run, spec)
                self._move_in(path, run)
                point("keeper.moved")
                self._take_claim(run)
                point("keeper.claimed")
                fence.close(run.attempt)
                point("keeper.closed")
                if not wanted.is_of_this_boot:
                    run.make_claim_last()
            except (OSError, Refused, TakesTime):
                os.close(lock)
                raise
        return Claimed(run, spec, document["hash"], lock)

    def prepare(self) -> None:
        """When there is nothing else to do: a start that comes alone has less to wait for."""
        if len(self._spare) < _SPARE:
            with contextlib.suppress(OSError):  # whoever needs one says so
                self._spare.append(self._new_blank())

    def clear(self) -> None:
        """Nobody is at it any more."""
        for path in self._spare:
            blank.delete(path)
        with contextlib.suppress(OSError):  # what is left is swept with the folder
            for name in os.listdir(self.folder):
                os.unlink(os.path.join(self.folder, name))
            os.rmdir(self.folder)

    def _blank(self) -> str:
        return self._spare.pop() if self._spare else self._new_blank()

    def _new_blank(self) -> str:
        self._count += 1
        path = "%s/blank-%d" % (self.folder, self._count)
        blank.make(path)
        return path

    def _fill(self, path: str, run: RunDir, spec: RunSpec) -> None:
        if spec.code is not None and not contents.fill(run, spec.code, path + "/work", _MOST_FILES):
            raise TakesTime

    def _move_in(self, path: str, run: RunDir) -> None:
        try:
            os.rename(path, run.path)
        except OSError as error:  # somebody else has made it; an empty folder there is replaced
            contents.empty(path + "/work")
            raise TakesTime from error

    def _take_claim(self, run: RunDir) -> None:
        """A link instead of a new file; as with one, there is one who gets it."""
        try:
            os.link(self._boot, run.file("claim"))
        except FileExistsError as error:
            raise TakesTime from error
        except OSError:  # no links here, or too many of them
            if not run.claim():
                raise TakesTime from None


class _Entered:
    def __init__(self, fence: Fence, fd: int, seen: List[int]) -> None:
        self._fence = fence
        self._fd = fd
        self.seen, self.closed = seen

    def enter(self, attempt: int) -> None:
        self._fence.numbers.write_to(self._fd, attempt, self.closed)

    def close(self, attempt: int) -> None:
        self._fence.numbers.write_to(self._fd, attempt, attempt)


@contextlib.contextmanager
def _entered(run: RunDir) -> Iterator[_Entered]:
    """From now on no older attempt can begin on this node, and none that has begun is there."""
    fence = run.fence
    fd = fence.open()
    try:
        if not fence.take(fd):
            raise TakesTime
        entered = _Entered(fence, fd, fence.numbers.read_from(fd))
        if run.attempt <= max(entered.seen, entered.closed) or (entered.seen and _has_older(run)):
            raise TakesTime
        entered.enter(run.attempt)
        yield entered
    finally:
        os.close(fd)


def _has_older(run: RunDir) -> bool:
    if run.attempt > _MOST_OLDER:
        return True
    return any(run.agent.run(run.job, attempt).exists() for attempt in range(1, run.attempt))


def start_rank(life: RunLife) -> None:
    spec = life.spec.ranks[0]
    try:
        log = CappedLog("%s/%s" % (life.run.path, blank.LOG), life.spec.log_cap_bytes, is_there=True)
    except OSError as error:
        raise NotStarted(spec.number, error.errno or 0, "its log") from error
    rank = Rank(spec, log)
    life.ranks.append(rank)
    rank.start_quickly(life.environment(spec.env), life.spec.cwd or os.fsencode(life.run.path + "/work"))
    point("keeper.first")


def write_state(run: RunDir, state: Dict[str, Any]) -> bytes:
    content = _encode({"v": VERSION, **state}).encode()
    blank.write(run.path + "/state.new", content)
    os.rename(run.path + "/state.new", run.path + "/state.json")
    return content


def told(claimed: Claimed, word: str, state: bytes, record: bytes, more: bytes = b"") -> bytes:
    """A run's status as ``RunDir.status`` has it, of what was written to its files."""
    run = claimed.run
    head = '{"job":"%s","attempt":%d,"status":"%s","is_claimed":true,"claimed_in":"%s","spec_hash":"%s"' % (
        run.job, run.attempt, word, boot_id(), claimed.spec_hash,
    )  # fmt: skip
    return b'%s,"state":%s,"exit":%s%s}' % (head.encode(), state or b"null", record or b"null", more)
