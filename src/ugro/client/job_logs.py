"""The logs of a job, followed over several connections: which of them, their pieces, and where each continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ugro.client.http import AgentGone, path_of, trying_again
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.jobs.operations import StreamJobLogs
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import error_from_wire
from ugro.node import wire

if TYPE_CHECKING:
    from ugro.client.client import Client


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes of a rank's log; or no bytes, and how many before this offset were dropped on the node."""

    attempt: int
    rank: int
    node: str
    offset: int
    content: bytes
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LogChoice:
    """Which logs to read; without ranks and nodes, all."""

    ranks: Sequence[int] = ()
    nodes: Sequence[str] = ()
    # With ``follow``: the newest, and later ones.
    attempt: int | Literal["newest", "all"] = "newest"
    since_unix_s: float | None = None  # lines that arrived here at that time or later
    tail: int | None = None
    follow: bool = False


@dataclass(slots=True)
class Following:
    """Reads the logs of one job over several connections: each continues where the last one broke."""

    client: Client
    job: str | int
    choice: LogChoice
    with_moves: bool = False
    _from_attempt: int | None = None
    _positions: dict[tuple[int, int], int] = field(default_factory=dict)
    _seen: Job | None = None

    def pieces(self) -> Iterator[Job | LogPiece]:
        for again in trying_again():
            try:
                for piece in self._over_one_connection():
                    again()
                    yield piece
            except AgentGone:
                continue
            return

    def _over_one_connection(self) -> Iterator[Job | LogPiece]:
        decoder = wire.Decoder()
        streams: dict[int, LogPiece] = {}
        for content in self.client.streamed(self._asked(), timeout_s=None):
            for kind, number, payload in decoder.feed(content):
                if kind == wire.RESULT:
                    yield from self._moved(decode(Job, wire.parse(payload)))
                elif kind == wire.ERROR:
                    raise error_from_wire(wire.parse(payload))
                elif kind == wire.OUT:
                    yield self._read(streams, number, payload)
                elif number == 0:
                    begin = wire.parse(payload)
                    self.job, self._from_attempt = int(begin["job"]), int(begin["from_attempt"])
                else:
                    streams[number] = here = decode(LogPiece, {**wire.parse(payload), "content": b""})
                    self._positions[here.attempt, here.rank] = here.offset
                    if here.dropped_bytes:
                        yield here

    def _moved(self, job: Job) -> Iterator[Job]:
        if self._seen is None or step_of(job) != step_of(self._seen):
            self._seen = job
            yield job

    def _read(self, streams: dict[int, LogPiece], number: int, content: bytes) -> LogPiece:
        at = streams[number]
        place = (at.attempt, at.rank)
        piece = LogPiece(at.attempt, at.rank, at.node, self._positions[place], content)
        self._positions[place] += len(content)
        return piece

    def _asked(self) -> StreamJobLogs:
        choice, attempt, first = self.choice, None, None
        if isinstance(choice.attempt, int):
            attempt = choice.attempt
        elif self._from_attempt is not None or choice.attempt == "all":
            first = self._from_attempt or 1
        return StreamJobLogs(
            str(self.job),
            tuple(choice.ranks),
            tuple(choice.nodes),
            attempt=attempt,
            from_attempt=first,
            since=choice.since_unix_s,
            tail=choice.tail,
            follow=choice.follow,
            moves=self.with_moves,
            at=tuple(f"{number}.{rank}:{at}" for (number, rank), at in self._positions.items()),
        )


def job_path(job: str | int) -> str:
    return path_of("jobs", job)


def step_of(job: Job) -> tuple[JobState, int, str]:
    return job.state, job.attempt, job.reason
