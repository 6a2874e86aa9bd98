"""A training as its records tell of it, made up: ranks that cost what is said, balanced by the real balancer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.train.rules.balance import Balancer, Batch, Observation
from ugro.train.rules.shares import Mode


@dataclass
class Pretend:
    """Seconds by rank, for each sample and for each step."""

    per_sample_s: Sequence[float]
    fixed_s: Sequence[float] = ()
    data_s: Sequence[float] = ()
    communication_s: float = 0.001
    other_s: float = 0.0
    noise: float = 0.02
    batch: int = 96
    mode: Mode = Mode.ADAPTIVE
    gradient_bytes: int | None = None
    seed: int = 1
    names: tuple[str, ...] = ()
    caps: Sequence[int | None] = ()
    records: list[dict[str, Any]] = field(default_factory=list)

    def run(self, steps: int) -> list[bytes]:
        ranks = len(self.per_sample_s)
        names = self.names or tuple(f"gpu{rank}" for rank in range(ranks))
        drawn = random.Random(self.seed)
        self._put("run", nodes=list(names), device="cpu", mode=str(self.mode), job="1", ranks=ranks, resumed_from=None)
        if self.gradient_bytes is not None:
            self._put("model", gradient_bytes=self.gradient_bytes, parameters=1, comm_hook=None)
        balancer = Balancer(Batch(self.batch, names), self.mode)
        if self.caps:
            balancer.limit(list(self.caps))
        self._plan(balancer, 0)
        for step in range(steps):
            shares = balancer.plan.shares
            own = self._step(step, shares, drawn)
            observed = Observation(shares, tuple(own), (0.0,) * ranks, self.communication_s)
            if balancer.observe(observed) is not None:
                self._plan(balancer, step + 1)
        return [json.dumps(record).encode() + b"\n" for record in self.records]

    def _step(self, step: int, shares: Sequence[int], drawn: random.Random) -> list[float]:
        zero = (0.0,) * len(shares)
        noisy = [max(0.2, drawn.gauss(1, self.noise)) for _ in shares]
        fixed, data = self.fixed_s or zero, self.data_s or zero
        compute = [f + share * s for f, share, s in zip(fixed, shares, self.per_sample_s, strict=True)]
        own = [(c + d + self.other_s) * n for c, d, n in zip(compute, data, noisy, strict=True)]
        slowest = max(own)
        self._put(
            "profile", step=step, epoch=0, samples=sum(shares), loss=1 / (step + 1), shares=list(shares), own_s=own,
            step_s=slowest + self.communication_s, imbalance=slowest * len(own) / sum(own),
            data_s=[d * n for d, n in zip(data, noisy, strict=True)],
            forward_s=[c * n / 3 for c, n in zip(compute, noisy, strict=True)],
            backward_s=[c * n * 2 / 3 for c, n in zip(compute, noisy, strict=True)],
            waiting_s=[slowest - one for one in own], communication_s=[self.communication_s] * len(own),
            optimizer_s=list(zero),
        )  # fmt: skip
        return own

    def _plan(self, balancer: Balancer, holds_from: int) -> None:
        plan = balancer.plan
        self._put(
            "plan", step=max(0, holds_from - 1), holds_from=holds_from, mode=str(self.mode), reason=plan.reason,
            shares=list(plan.shares), micro_batches=list(plan.micro_batches), caps=list(balancer.caps),
            predicted_s=plan.predicted_s,
        )  # fmt: skip

    def _put(self, kind: str, **fields: Any) -> None:
        self.records.append({"time": 1.0, "attempt": 1, "rank": 0, "kind": kind, **fields})
