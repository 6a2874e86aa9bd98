"""Model nodes: each keeps the promises of the protocol, and nothing more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, cast

from ugro.kernel.jobs.engine.runs import RankRecord, RunStart, RunStatus
from ugro.kernel.links.model import Machine
from ugro.kernel.support.errors import RemoteFailure

Key = tuple[int, int]  # job and attempt


class Of(StrEnum):
    """A rank of an elastic run, which goes on without those that are lost."""

    RUNS = "runs"
    DONE = "done"
    LOST = "lost"


@dataclass
class Run:
    status: RunStatus
    lives: bool = True  # of its ranks, any
    ranks: dict[int, Of] = field(default_factory=dict)  # of an elastic run
    starts: dict[int, int] = field(default_factory=dict)  # of each of these

    def among(self, state: Of) -> list[int]:
        return [rank for rank, now in self.ranks.items() if now is state]


@dataclass
class ModelNode:
    name: str
    root: str = "here"
    is_reachable: bool = True
    loses_answers: bool = False  # what is asked is done, and nobody hears of it
    runs: dict[Key, Run] = field(default_factory=dict)
    fence: dict[int, tuple[int, int]] = field(default_factory=dict)  # seen and closed, by job
    starts: Counter[Key] = field(default_factory=Counter)
    done: set[tuple[Key, int]] = field(default_factory=set)  # ranks of elastic runs that have ended with 0
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
            status = RunStatus(str(job), attempt, "running", True, started_ranks=tuple(ranks))
            is_elastic = bool(order.settings.get("elastic"))
            states = dict.fromkeys(ranks, Of.RUNS) if is_elastic else {}
            self.runs[key] = Run(status, ranks=states, starts=dict.fromkeys(states, 1))
        return self.runs[key].status

    # --- ranks of elastic runs ----------------------------------------------------------------------------------

    def start_again(self, key: Key, rank: int, starts: int) -> None:
        """An order that comes twice is one."""
        run = self.runs.get(key)
        if run is None:
            raise RemoteFailure("no such run", cause="not-found", subject=self.name)
        if run.status.status == "running" and run.ranks.get(rank) is Of.LOST and run.starts[rank] == starts:
            run.ranks[rank], run.starts[rank] = Of.RUNS, starts + 1
            self._tell(run)

    def lose_rank(self, key: Key, rank: int) -> None:
        run = self.runs[key]
        run.ranks[rank] = Of.LOST
        self._tell(run)

    def hear_of_group(self, key: Key, number: int, members: Sequence[int]) -> None:
        """Its ranks say who trains together."""
        run = self.runs[key]
        run.status = replace(run.status, group=number, members=tuple(members), changes=run.status.changes + 1)

    def _tell(self, run: Run) -> None:
        lost = tuple(_lost(rank, run.starts[rank]) for rank in run.among(Of.LOST))
        run.status = replace(run.status, lost=lost, changes=run.status.changes + 1)

    def _finish_ranks(self, key: Key, run: Run) -> None:
        for rank in run.among(Of.RUNS):
            run.ranks[rank] = Of.DONE
            self.done.add((key, rank))
        if not run.among(Of.LOST):
            self._end(key, run, "succeeded", 0)

    # --- ends ---------------------------------------------------------------------------------------------------

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
        run = self.runs[key]
        if not run.ranks:
            self._end(key, run, "failed" if code else "succeeded", code)
        elif not code:
            self._finish_ranks(key, run)
        elif running := run.among(Of.RUNS):
            self.lose_rank(key, running[0])

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
        ends = [_record(run, rank, code) for rank in run.status.started_ranks]
        failed = run.status.started_ranks[0] if code and run.status.started_ranks else None
        # A small log comes along with the news of a good end.
        logs = tuple((rank, b"") for rank in run.status.started_ranks) if outcome == "succeeded" else None
        told_ranks = () if outcome == "lost" else tuple(ends)
        told = {"outcome": outcome, "logs": logs, "ranks": told_ranks, "failed_rank": failed}
        run.status = replace(run.status, status="exited", lost=(), **cast(Any, told))
        run.lives = False


def _record(run: Run, rank: int, code: int | None) -> RankRecord:
    if run.ranks.get(rank) is Of.LOST:
        return _lost(rank, run.starts[rank])
    is_done = run.ranks.get(rank) is Of.DONE
    return RankRecord(rank, 0 if is_done else code, None if is_done or code is not None else 15, 1.0)


def _lost(rank: int, starts: int) -> RankRecord:
    return RankRecord(rank, None, 9, 1.0, was_lost=True, starts=starts)
