"""The runs on one node, asked over its link: start, look, follow, stop, remove. Typed; every call can be made again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ugro.core.codec import DecodeError, decode
from ugro.core.errors import RemoteFailure
from ugro.core.plan import NodePlan
from ugro.nodes.node import Node
from ugro.remote import wire

_RANK_KEYS = ("rank", "code", "signal", "ended_at", "is_oom")
_START_S = 120.0
_PREPARE_S = 30.0


@dataclass(frozen=True, slots=True)
class RankRecord:
    rank: int
    code: int | None = None
    signal: int | None = None
    ended_at: float | None = None
    is_oom: bool = False


@dataclass(frozen=True, slots=True)
class RunStatus:
    """``dead``: the supervisor is gone without a last word; the ranks may live on until they are stopped."""

    job: str
    attempt: int
    status: str  # starting, running, exited, dead; or absent: stopped where it had never come to be
    is_claimed: bool = False
    outcome: str | None = None
    reason: str | None = None
    ranks: tuple[RankRecord, ...] = ()
    failed_rank: int | None = None
    tail: tuple[str, ...] = ()
    boot_id: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status == "exited"


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


@dataclass(slots=True)
class Runs:
    node: Node
    identity: Identity
    connect_s: float
    answer_s: float

    async def start(self, job: int, attempt: int, plan: NodePlan, settings: dict[str, Any]) -> RunStatus:
        ranks = [{"rank": rank.rank, "argv": list(rank.argv), "env": dict(rank.env)} for rank in plan.ranks]
        spec = {"ranks": ranks, "cwd": plan.cwd, **settings}
        answer = await self._call("start", _START_S, job=str(job), attempt=attempt, spec=spec)
        return _status(answer["run"])

    async def list(self) -> list[RunStatus]:
        found: list[RunStatus] = []
        after = None
        while True:
            answer = await self._call("list", self.answer_s, after=after)
            found += [_status(run) for run in answer["runs"]]
            if not answer["has_more"] or not answer["runs"]:
                return found
            after = f"{found[-1].job}.{found[-1].attempt}"

    async def stop(self, job: int, attempt: int, reason: str, grace_s: float) -> RunStatus:
        limit_s = grace_s + _PREPARE_S
        answer = await self._call("stop", limit_s, job=str(job), attempt=attempt, reason=reason, grace_s=grace_s)
        return _status(answer["run"])

    async def remove(self, job: int, attempt: int) -> None:
        await self._call("remove", _PREPARE_S, job=str(job), attempt=attempt)

    async def reserve_port(self, job: int, attempt: int) -> int:
        answer = await self._call("reserve_port", self.answer_s, job=str(job), attempt=attempt, count=1)
        return int(answer["ports"][0])

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


def _status(answer: dict[str, Any]) -> RunStatus:
    record = answer.get("exit") or {}
    failure = record.get("failure") or {}
    try:
        return decode(
            RunStatus,
            {
                **{key: answer[key] for key in ("job", "attempt", "status", "is_claimed")},
                "outcome": record.get("outcome"),
                "reason": record.get("reason"),
                "ranks": [{key: rank.get(key) for key in _RANK_KEYS} for rank in record.get("ranks", [])],
                "failed_rank": failure.get("rank"),
                "tail": failure.get("tail") or [],
                "boot_id": (answer.get("state") or record).get("boot_id"),
            },
        )
    except (DecodeError, KeyError, TypeError, AttributeError) as error:
        raise RemoteFailure(f"a run's status makes no sense: {error}") from error
