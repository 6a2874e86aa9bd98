"""The runs on one node, asked over its link: start, look, follow, stop, remove. Typed; every call can be made again."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ugro.core.errors import RemoteFailure, UgroError, UsageError
from ugro.core.plan import NodePlan
from ugro.nodes.node import Node
from ugro.remote import wire

_START_S = 120.0
_PREPARE_S = 30.0
_MOST_BYTES = wire.MAX_PAYLOAD // 2


@dataclass(frozen=True, slots=True)
class RankRecord:
    rank: int
    code: int | None = None
    signal: int | None = None
    ended_at: float | None = None
    is_oom: bool = False


@dataclass(frozen=True, slots=True)
class RunStatus:
    """``dead``: the supervisor is gone without an exit record; the ranks may live on until they are stopped."""

    job: str
    attempt: int
    status: str  # starting, running, exited, dead; or absent: stopped where it had never come to be
    is_claimed: bool = False
    outcome: str | None = None
    reason: str | None = None
    ranks: tuple[RankRecord, ...] = ()
    started_ranks: tuple[int, ...] = ()
    failed_rank: int | None = None
    is_programs_fault: bool = False  # it could not be started because of what it is, not because of where
    is_disk_full: bool = False  # when its first rank failed, or could not be started, nothing more could be written
    tail: tuple[str, ...] = ()
    was_rebooted: bool = False
    # By rank, of one that has ended: whole, where they are so small that they came with its exit.
    logs: tuple[tuple[int, bytes], ...] | None = None
    has_outputs: bool = False  # of one that has ended: it wrote something to be kept

    @property
    def has_ended(self) -> bool:
        return self.status == "exited"

    @property
    def known_ranks(self) -> tuple[int, ...]:
        """Also of a run whose supervisor died without an exit record; none when it died before it could say which."""
        return tuple(sorted({rank.rank for rank in self.ranks} | set(self.started_ranks)))

    @property
    def progress(self) -> int:
        """Only ever grows: of two words about a run, the one that is further is the newer one."""
        if self.status == "dead":
            return 3 if self.is_claimed else 0
        return {"absent": 0, "starting": 1, "running": 2, "exited": 4}[self.status]


@dataclass(frozen=True, slots=True)
class Moment:
    """An instant on a node's own clock, as the node reported it; given back, it says how fresh our request is."""

    boot_id: str
    clock_s: float

    def params(self) -> dict[str, Any]:
        return {"boot_id": self.boot_id, "clock_s": self.clock_s}


@dataclass(frozen=True, slots=True)
class News:
    """What a node says of our runs: all of them when ``is_first``, later those that changed."""

    now: Moment
    runs: tuple[RunStatus, ...] = ()
    gone: tuple[str, ...] = ()  # JOB.ATTEMPT
    is_first: bool = False
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks: nodes keep the runs of different agents apart, and refuse an agent that was replaced."""

    agent: str
    generation: int

    def params(self, **more: Any) -> dict[str, Any]:
        return {"agent": self.agent, "generation": self.generation, **more}


@dataclass(slots=True)
class Piece:
    """Some bytes of a followed file, and where they stand in it."""

    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run to be started on a node; the same one each time it is asked for."""

    job: int
    attempt: int
    plan: NodePlan
    settings: dict[str, Any]
    # Of the node when it was decided.
    boot_id: str | None = None
    root: str | None = None
    as_of: Moment | None = None  # the instant that its lease counts from

    def params(self) -> dict[str, Any]:
        ranks = [{"rank": rank.rank, "argv": list(rank.argv), "env": dict(rank.env)} for rank in self.plan.ranks]
        spec = {"ranks": ranks, "cwd": self.plan.cwd, **self.settings}
        where = {"boot_id": self.boot_id, "root": self.root} if self.boot_id else {}
        as_of = {"as_of": self.as_of.params()} if self.as_of else {}
        return {"job": str(self.job), "attempt": self.attempt, "spec": spec, **where, **as_of}


@dataclass(slots=True)
class Runs:
    node: Node
    identity: Identity
    connect_s: float
    answer_s: float

    async def start(self, starts: Sequence[RunStart]) -> list[RunStatus | UgroError]:
        """Each one's status, or why it was refused."""
        results: list[RunStatus | UgroError] = []
        for runs in _packed([start.params() for start in starts]):
            if isinstance(runs, UgroError):
                results.append(runs)
                continue
            answer = await self._call("start", _START_S, runs=runs)
            results += [self._failure(one) or _status(one["run"]) for one in answer["results"]]
        return results

    async def remove(self, runs: Sequence[tuple[int, int]]) -> list[RemoteFailure | None]:
        """Job and attempt of each: None where it is gone now."""
        answer = await self._call("remove", _PREPARE_S, runs=[[str(job), attempt] for job, attempt in runs])
        return [self._failure(one) for one in answer["results"]]

    def _failure(self, result: dict[str, Any]) -> RemoteFailure | None:
        if (error := result.get("error")) is None:
            return None
        return RemoteFailure(str(error["message"]), subject=self.node.spec.name, cause=str(error["kind"]))

    async def watch(self) -> AsyncGenerator[News]:
        """All our runs on the node, then every change of one, until the link is lost."""
        link = await self.node.ready(self.connect_s)
        stream = link.stream("runs.watch", self.identity.params())
        try:
            async for _, payload in stream:
                yield _news(payload)
            await stream.result()
        finally:
            stream.cancel()

    async def renew(self, as_of: Moment) -> Moment:
        """Says that we were alive at that moment: the runs there with a lease go on."""
        answer = await self._call("renew", self.answer_s, as_of=as_of.params())
        return _moment(answer)

    async def stop(self, job: int, attempt: int, reason: str, grace_s: float) -> RunStatus:
        limit_s = grace_s + _PREPARE_S
        answer = await self._call("stop", limit_s, job=str(job), attempt=attempt, reason=reason, grace_s=grace_s)
        return _status(answer["run"])

    async def trace(self, job: int, attempt: int, steps: int, key: str) -> None:
        """Asks the ranks to record their next steps; once for each key."""
        await self._call("control", self.answer_s, job=str(job), attempt=attempt, trace_steps=steps, key=key)

    async def follow(self, job: int, attempt: int, file: str, offset: int) -> AsyncIterator[Piece]:
        """The file's bytes from ``offset`` on, live, until the run has ended; a cut head makes the offset jump."""
        link = await self.node.ready(self.connect_s)
        params = self.identity.params(job=str(job), attempt=attempt, file=file, offset=offset)
        stream = link.stream("runs.follow", params)
        try:
            async for kind, payload in stream:
                if kind == wire.ERR:
                    offset = int(json.loads(payload)["offset"])
                else:
                    yield Piece(offset, payload)
                    offset += len(payload)
            await stream.result()
        finally:
            stream.cancel()

    async def _call(self, method: str, timeout_s: float, **params: Any) -> dict[str, Any]:
        link = await self.node.ready(self.connect_s)
        return await link.call(f"runs.{method}", self.identity.params(**params), timeout_s=timeout_s)


def _packed(runs: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]] | UgroError]:
    """As many in one message as fit into it; in its place, what fits into none."""
    if len(json.dumps(runs)) <= _MOST_BYTES:
        yield runs
        return
    part: list[dict[str, Any]] = []
    size = 0
    for run in runs:
        length = len(json.dumps(run))
        if part and size + length > _MOST_BYTES:
            yield part
            part, size = [], 0
        if length > _MOST_BYTES:
            yield UsageError(f"job {run['job']} is too large to send: {length} bytes (limit {_MOST_BYTES})")
            continue
        part.append(run)
        size += length
    if part:
        yield part


def _news(payload: bytes) -> News:
    try:
        document = json.loads(payload)
        return News(
            _moment(document),
            tuple(_status(run) for run in document["runs"]),
            tuple(str(name) for name in document.get("gone", ())),
            bool(document.get("is_first")),
            bool(document.get("has_more")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RemoteFailure(f"invalid report on its runs: {error!r:.200}") from error


def _moment(answer: dict[str, Any]) -> Moment:
    return Moment(str(answer["now"]["boot_id"]), float(answer["now"]["clock_s"]))


def _status(answer: dict[str, Any]) -> RunStatus:
    """By hand, for it is most of what is heard of a thousand small jobs; every value is made what it should be."""
    try:
        state, record = answer.get("state") or {}, answer.get("exit") or {}
        failure = record.get("failure") or {}
        return RunStatus(
            job=str(answer["job"]),
            attempt=int(answer["attempt"]),
            status=_STATUS[answer["status"]],
            is_claimed=bool(answer["is_claimed"]),
            outcome=_text(record.get("outcome")),
            reason=_text(record.get("reason")),
            ranks=tuple(_rank(rank) for rank in record.get("ranks", ())),
            started_ranks=tuple(int(rank["rank"]) for rank in state.get("ranks", ())),
            failed_rank=_number(failure.get("rank")),
            is_programs_fault=failure.get("kind") == "program",
            is_disk_full=bool(failure.get("is_disk_full")),
            tail=tuple(str(line) for line in failure.get("tail") or ()),
            was_rebooted=bool(record and answer.get("claimed_in") and answer["claimed_in"] != record.get("boot_id")),
            logs=_logs(answer["logs"]) if answer.get("logs") else None,
            has_outputs=bool(answer.get("has_outputs")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RemoteFailure(f"invalid run status: {error!r:.200}") from error


_STATUS = {word: word for word in ("starting", "running", "exited", "dead", "absent")}


def _rank(record: dict[str, Any]) -> RankRecord:
    ended_at = record.get("ended_at")
    return RankRecord(
        int(record["rank"]),
        _number(record.get("code")),
        _number(record.get("signal")),
        None if ended_at is None else float(ended_at),
        bool(record.get("is_oom")),
    )


def _logs(logs: dict[str, Any]) -> tuple[tuple[int, bytes], ...]:
    found = [(int(rank), base64.b64decode(log["content"], validate=True), log["size"]) for rank, log in logs.items()]
    if any(len(content) != size for _, content, size in found):
        raise ValueError("a log is not as long as it says")
    return tuple((rank, content) for rank, content, _ in found)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
