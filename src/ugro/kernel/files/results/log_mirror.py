"""Fetches the logs of ranks while they are written, by byte offset: a broken link loses and repeats nothing.

The same goes for what the devices of a node used: the file that its meter writes is one more log of the run.

The size of a file here is the cursor: the next byte to fetch is the one after it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from ugro.features.training.on_node import ENERGY
from ugro.kernel.files.results.file_store import DiskFull, expect_room
from ugro.kernel.files.results.job_folder import energy_file, rank_log
from ugro.kernel.jobs.engine.rules.reported_run import most_log_bytes
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import Piece
from ugro.kernel.jobs.moves import SmallLog
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.store.engine import is_short
from ugro.kernel.support import moments as clock
from ugro.kernel.support.aio import ChangeSignal, to_the_end
from ugro.kernel.support.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.support.moments import Instant, elapsed_s, unix_seconds

# --- the index beside a log -------------------------------------------------------------------------------------------
# A small text file beside a log that says when its bytes arrived, and which of them never did.
#
# ``time SECONDS OFFSET``: the bytes from this offset on arrived at this time or within a second after it, up to the
# next such line. ``gap FROM TO``: the node dropped these bytes before they could be fetched; the log has a hole there.
# A log that arrived as a whole has no such file: it arrived when the file was written.


EVERY_S = 1.0
_BLOCK = 64 * 1024


class LogIndexWriter:
    """For one log, while it is fetched. Created again after a restart, it only appends."""

    def __init__(self, log: Path) -> None:
        self._path = index_path(log)
        self._noted_at = float("-inf")

    def note(self, size: int, offset: int, arrived_unix_s: float | None = None) -> None:
        """Before bytes are written at ``offset`` of a log that has ``size`` so far; they arrived now, or then."""
        lines = f"gap {size} {offset}\n" if offset > size else ""
        if time.monotonic() - self._noted_at >= EVERY_S:
            self._noted_at = time.monotonic()
            lines += f"time {arrived_unix_s or time.time():.3f} {offset}\n"
        if lines:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, lines.encode())
            finally:
                os.close(descriptor)


class LogIndex:
    """Read while it grows: ``refresh`` reads what was added since."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._path = index_path(log)
        self._read = 0
        self._times: list[tuple[float, int]] = []
        self._gaps: dict[int, int] = {}  # the first byte of each, and the one after its last

    def refresh(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                lines, end, _ = file.read().rpartition(b"\n")  # the last line may be half written
        except FileNotFoundError:
            return
        self._read += len(lines) + len(end)
        for line in lines.decode().splitlines():
            match line.split():
                case ["time", seconds, offset]:
                    self._times.append((float(seconds), int(offset)))
                case ["gap", start, stop]:
                    # Noted again, and larger, if an agent died before it wrote behind the gap.
                    self._gaps[int(start)] = int(stop)

    def offset_at(self, since_unix_s: float, size: int) -> int:
        """The offset from which a log of ``size`` bytes arrived at that time or later; up to a second too early."""
        times = self._times or [(written_at(self._log) or 0.0, 0)]
        return next((offset for seconds, offset in times if seconds + EVERY_S > since_unix_s), size)

    def gap_at(self, offset: int) -> tuple[int, int] | None:
        return next((gap for gap in self._gaps.items() if gap[0] <= offset < gap[1]), None)

    def next_gap(self, offset: int) -> int | None:
        """Where the first gap behind ``offset`` begins."""
        return min((start for start in self._gaps if start > offset), default=None)

    def begin_after(self, offset: int) -> int:
        """The end of the last gap before ``offset``, or 0: how far back the bytes are contiguous."""
        return max((end for end in self._gaps.values() if end <= offset), default=0)


def written_at(log: Path) -> float | None:
    """When a log without an index arrived."""
    try:
        return log.stat().st_mtime
    except FileNotFoundError:
        return None


def line_begin(log: Path, offset: int, least: int) -> int:
    """Where the line with the byte before ``offset`` begins; not before ``least``, and not far back."""
    least = max(least, offset - _BLOCK)
    with log.open("rb") as file:
        file.seek(least)
        found = file.read(offset - least).rfind(b"\n")
    return least + found + 1 if found >= 0 else least


def last_lines(log: Path, size: int, lines: int, least: int) -> int:
    """Where the last ``lines`` lines of the first ``size`` bytes begin; not before ``least``."""
    with log.open("rb") as file:
        end, wanted = size, lines
        while end > least:
            begin = max(least, end - _BLOCK)
            file.seek(begin)
            block = file.read(end - begin)
            if end == size and block.endswith(b"\n"):
                wanted += 1
            at = len(block)
            while wanted and (at := block.rfind(b"\n", 0, at)) >= 0:
                wanted -= 1
            if not wanted:
                return begin + at + 1
            end = begin
    return least


def index_path(log: Path) -> Path:
    return log.with_suffix(".times")


# --- fetching logs ----------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_DAY_S = 86400.0
_AGAIN_S = 1.0
_ROOM_EVERY_BYTES = 16 << 20  # after so many bytes of a log, the room on the disk is looked at again

Key = tuple[int, int, int | str]  # job, attempt, and a rank; a node: of what its devices used

OnEnergy = Callable[[int], None]


class LogMirror:
    def __init__(self, folder: Path, watch: RunTracker, on_energy: OnEnergy = lambda job: None) -> None:
        """``on_energy`` is called with a job when more is known of what its devices used."""
        self.changed = ChangeSignal()  # bytes of a log arrived
        self._folder = folder
        self._watch = watch
        self._tasks: dict[Key, asyncio.Task[bool]] = {}
        self._on_energy = on_energy

    def path(self, job: int, attempt: int, rank: int) -> Path:
        return rank_log(self._folder / str(job), attempt, rank)

    def has_begun(self, job: int, attempt: int, ranks: Iterable[int]) -> bool:
        """Whether a part of their logs may be here."""
        return any(self.path(job, attempt, rank).exists() for rank in ranks)

    def is_following(self, key: Key) -> bool:
        return key in self._tasks

    def follow(self, node: str, key: Key, placed: Instant) -> None:
        """Starts, or continues after a restart; once per rank.

        ``placed``: when its attempt was. No log is larger than one can be since then.
        """
        if key not in self._tasks:
            name = "log of job {}, attempt {}: {}".format(*key)
            self._tasks[key] = asyncio.create_task(self._mirror(node, key, placed), name=name)

    async def finish(self, job: int, attempt: int, ranks: Iterable[int | str], timeout_s: float) -> bool:
        """Waits until the logs of ranks that have ended are complete; False if some could not be fetched."""
        keys = [(job, attempt, rank) for rank in ranks if (job, attempt, rank) in self._tasks]
        tasks = [self._tasks[key] for key in keys]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for key in keys:
            if (task := self._tasks.pop(key, None)) is not None:
                task.cancel()
        return all(_has_all(task) for task in tasks)

    async def unfollow(self, keys: Iterable[Key]) -> None:
        """Follows these no longer: all of their output is known."""
        tasks = [self._tasks.pop(key) for key in keys if key in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def keep(self, job: int, attempt: int, logs: Sequence[tuple[int, bytes]], ended_unix_s: float) -> None:
        """Writes the whole logs of a run that ended then, which arrived with its exit record. Blocks."""
        for rank, content in logs:
            path = self.path(job, attempt, rank)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                there = os.pread(descriptor, len(content) + 1, 0)
                if there == content and content:
                    continue
                if not there:  # it arrived as a whole, at the time of the file: it needs no index
                    _write(descriptor, content, 0)
                    os.utime(descriptor, (ended_unix_s, ended_unix_s))
                elif content.startswith(there):
                    LogIndexWriter(path).note(len(there), len(there), ended_unix_s)
                    _write(descriptor, content[len(there) :], len(there))
                else:  # what a power cut left of it
                    _write(descriptor, content, 0)
                    os.ftruncate(descriptor, len(content))
            finally:
                os.close(descriptor)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _mirror(self, node: str, key: Key, placed: Instant) -> bool:
        """True when all of it has arrived."""
        extra = {"job": key[0], "node": node, "attempt": key[1]}
        problem = ""
        while True:
            try:
                await self._copy(node, key, placed)
                return True
            except (Unreachable, TimedOut):
                await asyncio.sleep(_AGAIN_S)
            except (RemoteFailure, NotFound) as error:
                log.warning("a log was not fetched: %s", error, extra=extra)
                return False
            except (DiskFull, OSError) as error:  # the disk may be cleaned up; meanwhile the log stays on the node
                if problem != (problem := str(error)):  # said once: the agent's own log is on that disk, too
                    log.error("a log cannot be written: %s", error, extra=extra)
                await asyncio.sleep(_AGAIN_S)

    async def _copy(self, node: str, key: Key, placed: Instant) -> None:
        job, attempt, what = key
        path, there = self._paths(job, attempt, what)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            writer = _Writer(descriptor, LogIndexWriter(path), path.parent)
            pieces = self._watch.runs(node).follow(
                (job, attempt), there, writer.size, lambda: most_log_bytes(age_s(placed))
            )
            async for piece in pieces:
                await to_the_end(partial(writer.write, piece))
                self.changed.notify()
                if there == ENERGY:
                    self._on_energy(job)
            # Before it counts as complete: then the node deletes its copy.
            await to_the_end(partial(os.fsync, descriptor))
        finally:
            os.close(descriptor)

    def _paths(self, job: int, attempt: int, what: int | str) -> tuple[Path, str]:
        """Where the file is here, and in the folder of its run on the node."""
        if isinstance(what, str):
            return energy_file(self._folder / str(job), attempt, what), ENERGY
        return self.path(job, attempt, what), f"logs/rank_{what}.log"


def age_s(placed: Instant) -> float:
    """If this machine was restarted since then, its clock may be wrong: rather too long than too short."""
    now = clock.now()
    return elapsed_s(placed, now) + (0.0 if placed.boot_id == now.boot_id else _DAY_S)


def _has_all(task: asyncio.Task[bool]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result()


class _Writer:
    def __init__(self, descriptor: int, index: LogIndexWriter, folder: Path) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._index = index
        self._folder = folder
        self._room = _ROOM_EVERY_BYTES  # that can be written before the disk is looked at: a short log always is

    def write(self, piece: Piece) -> None:
        if is_short(self._folder):
            hint = f"make room on the disk of {self._folder}"
            raise DiskFull("the disk is full; the log stays on the node", hint=hint)
        self._room -= len(piece.content)
        if self._room < 0:
            expect_room(self._folder, _ROOM_EVERY_BYTES)
            self._room = _ROOM_EVERY_BYTES
        self._index.note(self.size, piece.offset)
        # At its own offset: where the head of a log was cut on the node, there is a hole here, which the index records.
        _write(self._descriptor, piece.content, piece.offset)
        self.size = piece.offset + len(piece.content)


def _write(descriptor: int, content: bytes, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)


# --- logs of small commands -------------------------------------------------------------------------------------------
# They come with the news of the command's end and are recorded with it, in one commit. They become files when somebody
# wants to read them: making folders and files takes longer than most such commands.


class SmallLogs:
    def __init__(self, jobs: JobStore, mirror: LogMirror) -> None:
        self.mirror = mirror
        self._jobs = jobs
        self._lock = asyncio.Lock()

    async def show(self, job: int) -> None:
        """Before the files of a job that has ended are read."""
        found = await self._jobs.small_log(job)
        if found is not None:
            log, ended_at = found
            await self.keep(log, unix_seconds(ended_at))

    async def keep(self, log: SmallLog, ended_unix_s: float) -> None:
        try:
            async with self._lock:
                await to_the_end(partial(self.mirror.keep, log.job, log.attempt, log.ranks, ended_unix_s))
        except OSError as error:
            hint = "nothing is lost: it is written when there is room"
            raise UgroError(f"the log of job {log.job} cannot be written: {error}", hint=hint) from error
