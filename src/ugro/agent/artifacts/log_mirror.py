"""Fetches the logs of ranks while they are written, by byte offset: a broken link loses and repeats nothing.

The size of a file here is the cursor: the next byte to fetch is the one after it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from ugro.agent.artifacts.job_folder import rank_log
from ugro.agent.artifacts.log_index import LogIndexWriter
from ugro.agent.support.aio import to_the_end
from ugro.agent.support.change_signal import ChangeSignal
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.nodes.runs import Piece

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


class LogMirror:
    def __init__(self, folder: Path, watch: RunTracker) -> None:
        self.changed = ChangeSignal()  # bytes of a log arrived
        self._folder = folder
        self._watch = watch
        self._tasks: dict[tuple[int, int, int], asyncio.Task[bool]] = {}

    def path(self, job: int, attempt: int, rank: int) -> Path:
        return rank_log(self._folder / str(job), attempt, rank)

    def follow(self, node: str, job: int, attempt: int, rank: int) -> None:
        """Starts, or continues after a restart; once per rank."""
        key = (job, attempt, rank)
        if key not in self._tasks:
            name = f"log of job {job}, attempt {attempt}, rank {rank}"
            self._tasks[key] = asyncio.create_task(self._mirror(node, *key), name=name)

    async def finish(self, job: int, attempt: int, ranks: Iterable[int], timeout_s: float) -> bool:
        """Waits until the logs of ranks that have ended are complete; False if some could not be fetched."""
        keys = [(job, attempt, rank) for rank in ranks if (job, attempt, rank) in self._tasks]
        tasks = [self._tasks[key] for key in keys]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for key in keys:
            if (task := self._tasks.pop(key, None)) is not None:
                task.cancel()
        return all(_has_all(task) for task in tasks)

    async def unfollow(self, keys: Iterable[tuple[int, int, int]]) -> None:
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

    async def _mirror(self, node: str, job: int, attempt: int, rank: int) -> bool:
        """True when all of it has arrived."""
        while True:
            try:
                await self._copy(node, job, attempt, rank)
                return True
            except (Unreachable, TimedOut):
                await asyncio.sleep(_AGAIN_S)
            except (RemoteFailure, NotFound) as error:
                log.warning("a log was not fetched: %s", error, extra={"job": job, "node": node, "attempt": attempt})
                return False
            except OSError as error:  # a full disk may be cleaned up; meanwhile the log stays on the node
                log.error("a log cannot be written: %s", error, extra={"job": job, "node": node, "attempt": attempt})
                await asyncio.sleep(_AGAIN_S)

    async def _copy(self, node: str, job: int, attempt: int, rank: int) -> None:
        path = self.path(job, attempt, rank)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            writer = _Writer(descriptor, LogIndexWriter(path))
            runs = self._watch.runs(node)
            async for piece in runs.follow(job, attempt, f"logs/rank_{rank}.log", writer.size):
                await to_the_end(partial(writer.write, piece))
                self.changed.notify()
            # Before it counts as complete: then the node deletes its copy.
            await to_the_end(partial(os.fsync, descriptor))
        finally:
            os.close(descriptor)


def _has_all(task: asyncio.Task[bool]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result()


class _Writer:
    def __init__(self, descriptor: int, index: LogIndexWriter) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._index = index

    def write(self, piece: Piece) -> None:
        self._index.note(self.size, piece.offset)
        # At its own offset: where the head of a log was cut on the node, there is a hole here, which the index records.
        _write(self._descriptor, piece.content, piece.offset)
        self.size = piece.offset + len(piece.content)


def _write(descriptor: int, content: bytes, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)
