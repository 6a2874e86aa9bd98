"""The logs of a job, followed over several connections: which of them, their pieces, and where each continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlencode

from ugro.client.http import AgentGone, path_of, trying_again
from ugro.kernel.jobs.model import Job, JobState
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import error_from_wire
from ugro.node import wire

Stream = Callable[..., Iterable[bytes]]


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

    stream: Stream
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
        for content in self.stream("GET", f"{job_path(self.job)}/logs?{urlencode(self._query())}", timeout_s=None):
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

    def _query(self) -> list[tuple[str, str]]:
        choice = self.choice
        query = [("rank", str(rank)) for rank in choice.ranks] + [("node", node) for node in choice.nodes]
        query += [("follow", str(choice.follow).lower()), ("moves", str(self.with_moves).lower())]
        if isinstance(choice.attempt, int):
            query.append(("attempt", str(choice.attempt)))
        elif self._from_attempt is not None or choice.attempt == "all":
            query.append(("from_attempt", str(self._from_attempt or 1)))
        if choice.since_unix_s is not None:
            query.append(("since", str(choice.since_unix_s)))
        if choice.tail is not None:
            query.append(("tail", str(choice.tail)))
        return query + [("at", f"{attempt}.{rank}:{at}") for (attempt, rank), at in self._positions.items()]


def job_path(job: str | int) -> str:
    return path_of("jobs", job)


def step_of(job: Job) -> tuple[JobState, int, str]:
    return job.state, job.attempt, job.reason
