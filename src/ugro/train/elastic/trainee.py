"""What changes in a run when its members do: names, shares, what is loaded ahead, and who writes for all."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ugro.core.errors import UsageError
from ugro.policy.balance.mode import Mode
from ugro.policy.balance.planner import Balancer, Batch
from ugro.train.balance import Balance
from ugro.train.elastic.membership import KEEP_HINT, Change
from ugro.train.loader import Loader
from ugro.train.metrics import Metrics
from ugro.train.sampler import Progress, Schedule
from ugro.train.stepping import Stepping


@dataclass(slots=True)
class ElasticRun:
    progress: Progress
    objects: dict[str, Any]
    stepping: Stepping
    balance: Balance
    metrics: Metrics
    mode: Mode
    speeds: tuple[float, ...]  # of all ranks of the job, if known
    introduce: Callable[[list[str]], None]  # records which ranks there are
    least: int = 1  # samples of a rank
    loader: Loader | None = None
    _known: dict[str, Any] | None = None  # what was learnt of ranks, also of those that are gone

    def kept(self) -> dict[str, Any]:
        return self.objects

    def lead(self) -> int:
        """Batches that are loaded ahead."""
        return 0 if self.balance.schedule is None else self.balance.schedule.lead

    def knowledge(self) -> dict[str, Any] | None:
        """Of the ranks, to plan with; the same on all of them, and all plan the same."""
        balancer = self.balance.balancer
        if balancer is None:
            return None
        self._known = {**(self._known or {}), **balancer.known()}
        batch = balancer.batch
        return {
            "known": self._known,
            "total": batch.total,
            "granule": batch.granule,
            "least": self.least,
            "can_accumulate": balancer.can_accumulate,
        }

    def regrouped(self, change: Change, knowledge: dict[str, Any] | None) -> None:
        rank, step = self.stepping.group.rank, self.progress.step
        self.stepping.group.nodes = change.names
        if self.stepping.way is not None:
            self.stepping.way.units = tuple(range(len(change.names)))
        self.balance.regroup(change.names, self.metrics if rank == 0 else None, step)
        if rank == 0:
            self._record(change)
            atexit.register(self.balance.close)  # before the writer's, which the record has registered
        if knowledge is None:
            return
        if self.loader is None:
            raise UsageError("a rank that joins has no loader yet", hint=KEEP_HINT)
        self._known = knowledge["known"]
        self._share_anew(change, knowledge)

    def _share_anew(self, change: Change, knowledge: dict[str, Any]) -> None:
        assert self.loader is not None
        ranks, total = change.formed.ranks, int(knowledge["total"])
        least = min(int(knowledge["least"]), total // len(ranks))
        batch = Batch(total, change.names, least, int(knowledge["granule"]))
        speeds = tuple(self.speeds[rank] for rank in ranks) if self.speeds else ()
        balancer = Balancer(batch, self.mode, speeds, can_accumulate=bool(knowledge["can_accumulate"]))
        balancer.recall(knowledge["known"])
        schedule = Schedule(balancer.plan, change.lead)
        self.balance.begin(balancer, schedule)
        self.loader.regroup(self.stepping.group.rank, schedule)

    def batch_again(self, batch: Any) -> Any:
        return None if self.loader is None else self.loader.again(batch)

    def _record(self, change: Change) -> None:
        self.introduce(list(change.names))
        self.metrics.put(
            {
                "kind": "members",
                "step": self.progress.step,
                "number": change.formed.number,
                "ranks": list(change.formed.ranks),
                "nodes": list(change.names),
                "lost": list(change.lost),
                "joined": list(change.joined),
                "seconds": round(change.seconds, 3),
            }
        )
