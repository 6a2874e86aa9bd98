"""Model nodes: each keeps the promises of the protocol, and nothing more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ugro.core.errors import RemoteFailure
from ugro.core.node import Machine
from ugro.nodes.runs import RankRecord, RunStart, RunStatus

Key = tuple[int, int]  # job and attempt


@dataclass
class Run:
    status: RunStatus
    lives: bool = True  # of its ranks, any


@dataclass
class ModelNode:
    name: str
    root: str = "here"
    is_reachable: bool = True
    loses_answers: bool = False  # what is asked is done, and nobody hears of it
    runs: dict[Key, Run] = field(default_factory=dict)
    fence: dict[int, tuple[int, int]] = field(default_factory=dict)  # seen and closed, by job
    starts: Counter[Key] = field(default_factory=Counter)
    boots: int = 1

    @property
    def machine(self) -> Machine:
        boot_id = f"{self.root}-boot-{self.boots}"
        return Machine(self.name, "", "", "", boot_id, "", self.root, "", "", 8, "", 0)

    def start(self, order: RunStart, ranks: Sequence[int]) -> RunStatus:
        key = job, attempt = order.job, order.attempt
        if order.boot_id != self.machine.boot_id:
            raise RemoteFailure("the node was restarted", cause="other-boot", subject=self.name)
        if order.root != self.root:
            raise RemoteFailure("the node is elsewhere", cause="other-root", subject=self.name)
        seen, closed = self.fence.get(job, (0, 0))
        if attempt < seen or attempt <= closed:
            raise RemoteFailure("a newer attempt came", cause="fenced", subject=self.name)
        self.fence[job] = (attempt, closed)
        for other, run in self.runs.items():
            if other[0] == job and other[1] < attempt and run.status.status != "exited":
                self._end(other, run, "stopped")
        if key not in self.runs:
            self.starts[key] += 1
            self.runs[key] = Run(RunStatus(str(job), attempt, "running", True, started_ranks=tuple(ranks)))
        return self.runs[key].status

    def stop(self, key: Key) -> RunStatus:
        job, attempt = key
        if key not in self.runs:
            seen, closed = self.fence.get(job, (0, 0))
            self.fence[job] = (max(seen, attempt), max(closed, attempt))
            return RunStatus(str(job), attempt, "absent")
        run = self.runs[key]
        if run.status.status != "exited":
            self._end(key, run, "lost" if run.status.status == "dead" else "stopped")
        return run.status

    def remove(self, key: Key) -> None:
        run = self.runs.get(key)
        if run is not None and run.status.status != "exited":
            raise RemoteFailure("stop it first", cause="not-exited", subject=self.name)
        seen, closed = self.fence.get(key[0], (0, 0))
        self.fence[key[0]] = (max(seen, key[1]), max(closed, key[1]))
        self.runs.pop(key, None)

    def finish(self, key: Key, code: int) -> None:
        self._end(key, self.runs[key], "failed" if code else "succeeded", code)

    def lose_supervisor(self, key: Key) -> None:
        """Its ranks may live on, and nobody says how it was."""
        run = self.runs[key]
        run.status = replace(run.status, status="dead")

    def power_off(self) -> None:
        self.boots += 1
        for key, run in self.runs.items():
            if run.status.status != "exited":
                self.lose_supervisor(key)
                run.lives = False

    def unfinished(self, status: str = "running") -> list[Key]:
        return sorted(key for key, run in self.runs.items() if run.status.status == status)

    def living(self) -> list[Key]:
        return [key for key, run in self.runs.items() if run.lives]

    @staticmethod
    def _end(key: Key, run: Run, outcome: str, code: int | None = None) -> None:
        ends = [RankRecord(rank, code, 15 if code is None else None, 1.0) for rank in run.status.started_ranks]
        failed = run.status.started_ranks[0] if code and run.status.started_ranks else None
        # A small log comes along with the news of a good end.
        logs = tuple((rank, b"") for rank in run.status.started_ranks) if outcome == "succeeded" else None
        told_ranks = () if outcome == "lost" else tuple(ends)
        told = {"outcome": outcome, "logs": logs, "ranks": told_ranks, "failed_rank": failed}
        run.status = replace(run.status, status="exited", **cast(Any, told))
        run.lives = False
