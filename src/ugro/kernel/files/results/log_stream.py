"""The logs of a job as a stream of frames, from what has been fetched; with ``follow`` until the job has ended.

A CALL frame says what the OUT frames of its number are: a rank of an attempt, and the offset of the next byte. With the
positions it has seen, a client whose agent died continues where it was: no byte is lost or repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ugro.kernel.access.caller import shown
from ugro.kernel.access.model import node_of
from ugro.kernel.files.results.log_mirror import LogIndex, LogMirror, SmallLogs, last_lines, line_begin
from ugro.kernel.jobs.model import Attempt, Job, Launcher
from ugro.kernel.jobs.operations import ReadJobLog, StreamJobLogs
from ugro.kernel.jobs.records import Plan
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support.aio import ChangeSignal, wait_for_any
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, UgroError, Unreachable, UsageError, error_from_wire
from ugro.kernel.support.quantities import format_size, is_number
from ugro.node import wire

Look = Callable[[int], Awaitable[Job]]

_LOOK_S = 0.5  # without a signal
_AHEAD_BYTES = 64 << 20
_AT_ONCE = wire.CHUNK  # of one rank, before it is another's turn


@dataclass(frozen=True, slots=True)
class Selection:
    ranks: tuple[int, ...] = ()  # none: all
    nodes: tuple[str, ...] = ()
    attempt: int | None = None
    from_attempt: int | None = None  # without both: the newest, and with ``follow`` later ones
    since_unix_s: float | None = None
    tail: int | None = None
    follow: bool = False
    with_moves: bool = False  # also the job, each time its state changes
    positions: Mapping[tuple[int, int], int] = field(default_factory=dict)  # where to continue, by attempt and rank

    def has(self, rank: int, node: str) -> bool:
        """``node``: or the login that the job was placed on."""
        is_there = not self.nodes or node in self.nodes or node_of(node) in self.nodes
        return is_there and (not self.ranks or rank in self.ranks)


def selection(asked: ReadJobLog | StreamJobLogs) -> Selection:
    """Returns which logs a request means. Raises UsageError."""
    if isinstance(asked, ReadJobLog):
        return Selection(ranks=(asked.rank,), attempt=asked.attempt, tail=asked.tail, follow=asked.follow)
    return Selection(
        ranks=asked.rank,
        nodes=asked.node,
        attempt=asked.attempt,
        from_attempt=asked.from_attempt,
        since_unix_s=asked.since,
        tail=asked.tail,
        follow=asked.follow,
        with_moves=asked.moves,
        positions=dict(_position(text) for text in asked.at),
    )


def _position(text: str) -> tuple[tuple[int, int], int]:
    place, _, offset = text.partition(":")
    attempt, _, rank = place.partition(".")
    if not all(map(is_number, (attempt, rank, offset))):
        raise UsageError(f"at: expected ATTEMPT.RANK:OFFSET, got {text:.60}")
    return (int(attempt), int(rank)), int(offset)


class LogStream:
    def __init__(self, jobs: JobStore, small: SmallLogs, moved: ChangeSignal, look: Look) -> None:
        self._jobs = jobs
        self._mirror = small.mirror
        self._small = small
        self._moved = moved
        self._look = look
        self.is_ending = False

    async def check(self, job: Job, wanted: Selection) -> None:
        """Raises NotFound for what an attempt does not have."""
        attempt = wanted.attempt or job.attempt
        await asyncio.to_thread(self._check_positions, job, wanted)
        if wanted.attempt is not None and not 1 <= wanted.attempt <= job.attempt:
            raise NotFound(f"job {job.id} has no attempt {wanted.attempt}", hint=f"it has {job.attempt}")
        found = await ranks_of(self._jobs, job, attempt)
        if not found:
            return
        ranks, nodes = set(found), set(found.values())
        if missing := sorted(set(wanted.ranks) - ranks):
            raise NotFound(f"job {job.id} has no rank {missing[0]}", hint=f"its ranks are 0 to {max(ranks)}")
        machines = {node_of(node) for node in nodes}
        if strange := sorted(set(wanted.nodes) - nodes - machines):
            raise NotFound(f"job {job.id} did not run on {strange[0]}", hint=f"it ran on {', '.join(sorted(machines))}")

    def _check_positions(self, job: Job, wanted: Selection) -> None:
        """Raises UsageError for a place that no log has. After a crash here a log may lack its last bytes."""
        for (attempt, rank), offset in wanted.positions.items():
            log = self._mirror.path(job.id, attempt, rank)
            size = log.stat().st_size if log.exists() else 0
            if attempt > max(1, job.attempt) or offset > size + _AHEAD_BYTES:
                text = f"at: the log of rank {rank} in attempt {attempt} has {size} bytes, and no byte {offset}"
                raise UsageError(text, hint="leave it out to begin at the beginning")

    async def frames(self, number: int, wanted: Selection) -> AsyncGenerator[bytes]:
        reading = _Reading(self._jobs, self._mirror, await self._look(number), wanted)
        yield wire.message(wire.CALL, 0, {"job": number, "from_attempt": reading.from_attempt})
        is_shown = False
        while not self.is_ending:
            seen = {self._mirror.changed: self._mirror.changed.count, self._moved: self._moved.count}
            # Looked at before the logs: everything written until its end is then read.
            if reading.is_due(self._moved):
                reading.job = await self._look(number)
            if reading.job.is_final and not is_shown:
                try:
                    await self._small.show(number)
                except UgroError as error:
                    yield wire.message(wire.ERROR, 0, error.to_wire())
                    return
                is_shown = True
            frames = await asyncio.to_thread(reading.read)
            has_opened = not frames and await reading.open_streams()
            frames += reading.moves(is_drained=not frames)
            if frames:
                yield b"".join(frames)
            elif (reading.job.is_final or not wanted.follow) and not has_opened:
                yield b"".join(reading.state_frames())
                return
            elif not has_opened:
                await wait_for_any(seen, _LOOK_S)
        yield wire.message(wire.ERROR, 0, agent_stops().to_wire())


async def ranks_of(jobs: JobStore, job: Job, attempt: int) -> dict[int, str]:
    """The node of each rank; empty before the job is placed."""
    tried = replace(job, attempt=attempt)
    if job.spec.launcher is Launcher.COMMAND:
        return rank_nodes(tried, await jobs.attempts(job.id), None)
    return rank_nodes(tried, (), await jobs.plan(tried))


def rank_nodes(job: Job, attempts: Iterable[Attempt], plan: Plan | None) -> dict[int, str]:
    """As ``ranks_of``, from records that were read already."""
    if job.spec.launcher is Launcher.COMMAND:  # one process, without a recorded plan
        return next(({0: one.placement.nodes[0]} for one in attempts if one.number == job.attempt), {})
    return {rank.rank: node.node for node in plan.nodes for rank in node.ranks} if plan else {}


def agent_stops() -> Unreachable:
    """Unlike a broken connection this is intended: no client starts another agent because of it."""
    hint = "jobs keep running; the next command starts it again"
    return Unreachable("the agent was stopped", cause="stopped", hint=hint)


class _Reading:
    """The position of one client in the logs of a job."""

    def __init__(self, jobs: JobStore, mirror: LogMirror, job: Job, wanted: Selection) -> None:
        self.from_attempt = wanted.attempt or wanted.from_attempt or max(1, job.attempt)
        self._jobs = jobs
        self._mirror = mirror
        self._wanted = wanted
        self._sent_state: tuple[Any, ...] | None = None
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._opened: set[int] = set()  # attempts
        self._has_begun = False
        self._moves_seen = -1
        self.job = job

    @property
    def job(self) -> Job:
        return self._job

    @job.setter
    def job(self, job: Job) -> None:
        self._job = job
        self._looked_at = time.monotonic()

    def is_due(self, moved: ChangeSignal) -> bool:
        """Whether to read the job again: its state or its reason may have changed."""
        has_moved, self._moves_seen = moved.count != self._moves_seen, moved.count
        return not self._job.is_final and (has_moved or time.monotonic() - self._looked_at >= _LOOK_S)

    def moves(self, *, is_drained: bool) -> list[bytes]:
        """The output of an attempt comes before the news of the next one."""
        is_another = self._sent_state is not None and self._sent_state[1] != self._job.attempt
        return [] if self._job.is_final or (is_another and not is_drained) else self.state_frames()

    def state_frames(self) -> list[bytes]:
        job = self._job
        state = (job.state, job.attempt, job.reason)
        if not self._wanted.with_moves or state == self._sent_state:
            return []
        self._sent_state = state
        return [wire.frame(wire.RESULT, 0, dumps(shown(job)).encode())]

    def read(self) -> list[bytes]:
        """Some bytes of every rank: none has to wait for one that writes without end."""
        return [frame for stream in self._streams.values() for frame in stream.read()]

    async def open_streams(self) -> bool:
        """True if there are new ones."""
        known = len(self._opened)
        last = self._wanted.attempt or self._job.attempt
        for attempt in range(self.from_attempt, last + 1):
            if attempt not in self._opened and (ranks := await ranks_of(self._jobs, self._job, attempt)):
                self._opened.add(attempt)
                self._open(attempt, ranks)
        self._has_begun = True
        return len(self._opened) > known

    def _open(self, attempt: int, ranks: Mapping[int, str]) -> None:
        for rank, node in ranks.items():
            if self._wanted.has(rank, node):
                log = self._mirror.path(self._job.id, attempt, rank)
                stream = _Stream(len(self._streams) + 1, attempt, rank, node, log)
                stream.offset = self._begin(stream)
                self._streams[attempt, rank] = stream

    def _begin(self, stream: _Stream) -> int:
        wanted = self._wanted
        if wanted.positions or self._has_begun:
            return wanted.positions.get((stream.attempt, stream.rank), 0)
        since = stream.begin_since(wanted.since_unix_s) if wanted.since_unix_s is not None else 0
        tail = stream.begin_of_tail(wanted.tail) if wanted.tail is not None else 0
        return max(since, tail)


@dataclass(slots=True)
class _Stream:
    number: int
    attempt: int
    rank: int
    node: str  # or a login to it
    log: Path
    offset: int = 0
    _index: LogIndex = field(init=False)
    _is_announced: bool = False

    def __post_init__(self) -> None:
        self._index = LogIndex(self.log)

    def begin_since(self, since_unix_s: float) -> int:
        self._index.refresh()
        size = self._size()
        offset = self._index.offset_at(since_unix_s, size)
        return line_begin(self.log, offset, self._index.begin_after(offset)) if size else 0

    def begin_of_tail(self, lines: int) -> int:
        self._index.refresh()
        size = self._size()
        return last_lines(self.log, size, lines, self._index.begin_after(size)) if size else 0

    def read(self) -> list[bytes]:
        """Frames; none when there is nothing new."""
        content = self._content()
        # Read before the index: bytes behind a gap are written after the gap was noted.
        self._index.refresh()
        frames = [] if self._is_announced else [self._announce(0)]
        self._is_announced = True
        if (gap := self._index.gap_at(self.offset)) is not None:
            dropped, self.offset = gap[1] - self.offset, gap[1]
            return [*frames, self._announce(dropped)]
        if (end := self._index.next_gap(self.offset)) is not None:
            content = content[: end - self.offset]
        self.offset += len(content)
        return [*frames, wire.frame(wire.OUT, self.number, content)] if content else frames

    def _announce(self, dropped: int) -> bytes:
        place = {"attempt": self.attempt, "rank": self.rank, "node": node_of(self.node), "offset": self.offset}
        return wire.message(wire.CALL, self.number, {**place, "dropped_bytes": dropped})

    def _content(self) -> bytes:
        try:
            with self.log.open("rb") as file:
                file.seek(self.offset)
                return file.read(_AT_ONCE)
        except FileNotFoundError:
            return b""

    def _size(self) -> int:
        try:
            return self.log.stat().st_size
        except FileNotFoundError:
            return 0


# --- logs as plain text -----------------------------------------------------------------------------------------------
# Programs that know HTTP alone get a log's text without frames.


async def log_text(frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The bytes of one rank; what UGRO has to say about them stands in brackets, on a line of its own."""
    decoder, text = wire.Decoder(), _Text()
    async with contextlib.aclosing(frames):
        async for content in frames:
            if found := b"".join(text.of(frame) for frame in decoder.feed(content)):
                yield found


class _Text:
    def __init__(self) -> None:
        self._attempt: int | None = None
        self._is_in_line = False

    def of(self, frame: wire.Frame) -> bytes:
        kind, number, payload = frame
        if kind == wire.OUT:
            self._is_in_line = not payload.endswith(b"\n")
            return payload
        if kind == wire.ERROR:
            return self._note(f"this log is not complete: {error_from_wire(wire.parse(payload))}")
        return b"".join(map(self._note, self._news(payload))) if kind == wire.CALL and number else b""

    def _news(self, payload: bytes) -> Iterator[str]:
        place = wire.parse(payload)
        if self._attempt not in (None, place["attempt"]):
            yield f"attempt {place['attempt']}"
        self._attempt = place["attempt"]
        if dropped := place.get("dropped_bytes"):
            yield f"{format_size(dropped)} of this log were dropped on {place['node']}: it grew too large"

    def _note(self, words: str) -> bytes:
        break_first, self._is_in_line = "\n" * self._is_in_line, False
        return f"{break_first}[{words}]\n".encode()
