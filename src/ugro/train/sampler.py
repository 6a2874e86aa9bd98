"""Selects the samples of a rank in each step: every sample once per epoch, also when shares change or a run resumes.

All ranks use one order, from the seed and the epoch, and a cursor that advances by a global batch each step. Each rank
takes a slice of the batch according to the plan of that step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ugro.policy.balance.planner import Plan

_LARGEST_SEED = 2**63
_DUMMY_SAMPLES = 2  # one would be too few for a BatchNorm


@dataclass(slots=True)
class Schedule:
    """Plans, each with the first step that it applies to.

    When a plan is made, ``lead`` steps are already being loaded, the same number on every rank.
    """

    first: Plan
    lead: int = 0
    total_at: Callable[[int], int] | None = None  # the size of a step's batch, where that is not always the same
    _plans: deque[tuple[int, Plan]] = field(default_factory=deque)

    def change(self, plan: Plan, after_step: int) -> int:
        """Adds a plan; returns the first step that it applies to."""
        holds_from = after_step + 1 + self.lead
        self._plans.append((holds_from, plan))
        return holds_from

    def at(self, step: int) -> Plan:
        """The plan of a step. Steps must be requested in order."""
        while self._plans and self._plans[0][0] <= step:
            self.first = self._plans.popleft()[1]
        return self.first


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's part of one global batch."""

    step: int
    shares: tuple[int, ...]
    own: int
    micro_batches: int
    cursor: int  # after this batch
    indices: list[int]
    weights: Weights | None = None
    most_micro_batches: int = 1  # of all ranks

    @property
    def total(self) -> int:
        return sum(self.shares)

    def part(self, begin: int, samples: int) -> float:
        """How much some of this rank's samples count in the whole batch."""
        if self.weights is None:
            return samples / self.total
        return math.fsum(self.weights.own[begin : begin + samples]) / self.weights.total if self.weights.total else 0.0


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each sample counts, such as its number of tokens, where not all count the same."""

    own: list[float]  # of this rank's samples
    total: float  # of all samples of the batch


@dataclass(slots=True)
class Progress:
    """The progress of a run; ``cursor`` counts the samples of the epoch that steps have used."""

    seed: int = 0
    epoch: int = 0
    cursor: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the samples of an epoch, and its batches."""

    samples: int
    global_batch: int
    is_shuffled: bool = True
    drops_last: bool = False
    weights: Any = field(default=None, compare=False)  # a tensor with the weight of each sample, or None

    @property
    def end(self) -> int:
        return self.samples - self.samples % self.global_batch if self.drops_last else self.samples

    @property
    def steps(self) -> int:
        return -(-self.end // self.global_batch)

    def of(self, seed: int, epoch: int) -> Any:
        import torch

        if not self.is_shuffled:
            return torch.arange(self.samples)
        made = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % _LARGEST_SEED)
        return torch.randperm(self.samples, generator=made)


def slices(order: Order, schedule: Schedule, progress: Progress, rank: int) -> Iterator[Slice]:
    """The rest of the epoch."""
    permutation = order.of(progress.seed, progress.epoch)
    cursor, step = progress.cursor, progress.step
    while cursor < order.end:
        wanted = order.global_batch if schedule.total_at is None else schedule.total_at(step)
        total = min(wanted, order.end - cursor)
        plan = schedule.at(step)
        shares = plan.share_of(total)
        begin = cursor + sum(shares[:rank])
        indices = permutation[begin : begin + shares[rank]].tolist()
        # A rank without samples of a short last batch still takes part, with weight zero.
        dummies = permutation[cursor : cursor + min(_DUMMY_SAMPLES, total)].tolist()
        weights = _weights(order, permutation[cursor : cursor + total], indices)
        cursor += total
        yield Slice(
            step, shares, shares[rank], plan.micro_batches[rank], cursor, indices or dummies, weights,
            max(plan.micro_batches),
        )  # fmt: skip
        step += 1


def _weights(order: Order, batch: Any, own: list[int]) -> Weights | None:
    """Every rank knows the whole batch, so nothing is exchanged for it."""
    if order.weights is None:
        return None
    return Weights(order.weights[own].tolist(), math.fsum(order.weights[batch].tolist()))
