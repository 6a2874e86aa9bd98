"""A trial: a few steps that measure a training before it is launched. It ends by itself and writes no checkpoints.

Alone on a node, batches of two sizes alternate: what a step costs at any size follows from that. Together with other
nodes, the training runs as it would, and in the end the exchange of gradients is timed by itself.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NoReturn

from ugro.kernel.support.errors import UsageError
from ugro.train.failures import DeviceMemory, SavedForBackward, memory_of
from ugro.train.group import Group
from ugro.train.reporting import Metrics
from ugro.train.rules.sync import SyncMode
from ugro.train.surroundings import Surroundings

_BLOCK = 4  # steps with the same size
_LOOKED_AT = 1  # the step in which is counted what layers keep for backward
_LEAST_STEPS = 4 * _BLOCK
_LEAST_SETTLED_STEPS = 12  # of a joint trial, with the shares that it has found
_SHORT = 3  # a trial takes this part of its limit, if that is enough steps
_EXCHANGES = 3
_MOST_NODES_PAIRED = 6  # of more, each is paired with the first one only
_BUCKET = 25 << 20  # as DDP sends them

NO_LOADER = "the script does not use run.loader, so its batches cannot be varied"
OTHER_LIBRARY = "another library runs the steps of this script, so they cannot be measured"


@dataclass(frozen=True, slots=True)
class Wish:
    """What UGRO asks for, in the variable ``UGRO_TRIAL``: ``solo:PARTS:SECONDS`` or ``joint:PARTS:SECONDS``."""

    is_joint: bool
    parts: int  # how many nodes may share a batch
    limit_s: float

    @classmethod
    def of(cls, text: str | None) -> Wish | None:
        if not text:
            return None
        try:
            kind, parts, seconds = text.split(":")
            if kind not in ("solo", "joint"):
                raise ValueError(kind)
            return cls(kind == "joint", max(1, int(parts)), float(seconds))
        except ValueError:
            raise UsageError(f"UGRO_TRIAL is not a trial: {text!r}", hint="example: solo:3:30") from None

    def is_met(self, steps: int, settled_steps: int, elapsed_s: float) -> bool:
        """``settled_steps``: those since the shares last changed."""
        is_settled = not self.is_joint or settled_steps >= _LEAST_SETTLED_STEPS
        has_enough = steps >= _LEAST_STEPS and is_settled and elapsed_s >= self.limit_s / _SHORT
        return has_enough or elapsed_s >= self.limit_s


class Trial:
    def __init__(self, wish: Wish, group: Group, metrics: Metrics | None, *, is_of_local: bool = False) -> None:
        """``metrics`` is given on the main rank only. ``is_of_local``: the training itself would be local SGD."""
        self.device_memory: DeviceMemory | None = memory_of(group.device)
        self.wish = wish
        self.is_over = False
        self._group = group
        self._nodes = list(group.nodes)  # of each rank
        self._sync = SyncMode.LOCAL if is_of_local else SyncMode.STEP
        self.units: Sequence[str] | None = None  # the names of groups of ranks, if samples are shared among those
        self._metrics = metrics
        self._sizes = (1, 1)
        self._begun: float | None = None
        self._steps = 0
        self._memory = [0, 0]  # the most in use with each size
        self._saved = SavedForBackward()
        self._facts: dict[str, Any] = {}

    @classmethod
    def of(cls, surroundings: Surroundings, group: Group, metrics: Metrics | None) -> Trial | None:
        """None if UGRO asks for no trial."""
        wish = Wish.of(surroundings.trial)
        return None if wish is None else cls(wish, group, metrics, is_of_local=surroundings.is_trial_of_local)

    def begin(self, global_batch: int, least: int) -> None:
        """Called when there is a loader."""
        small = min(global_batch, max(least * len(self.units or self._nodes), global_batch // (2 * self.wish.parts), 1))
        self._sizes = (global_batch, global_batch) if self.wish.is_joint else (small, global_batch)
        nodes = self._nodes if self.units is None else list(self.units)
        self._facts = {
            "global_batch": global_batch,
            "least": least,
            "nodes": nodes,
            "sizes": list(self._sizes),
            "sync": str(self._sync),
        }
        self._record()

    @property
    def has_steps(self) -> bool:
        return self._steps > 0

    def total_at(self, step: int) -> int:
        """The size of the batch of a step, the smaller one first: it is more likely to fit into memory."""
        return self._sizes[step // _BLOCK % 2]

    def before_step(self, step: int, samples: int) -> None:
        if step == _LOOKED_AT:  # the first ones are not timed
            self._saved.begin(samples)

    def after_step(self, step: int, settled_from: int, has_loader: bool) -> bool:
        """Whether the trial is to end. The main rank decides; the others learn it with the next step.

        ``settled_from``: the first step with the current shares.
        """
        if not has_loader:
            self.refuse(NO_LOADER)
        self._saved.end()
        self._look_at_memory(step)
        self._steps += 1
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
        self.is_over = self.is_over or self.wish.is_met(self._steps, step - settled_from, now - self._begun)
        return self.is_over and self._group.rank == 0

    def end(self, gradient_bytes: int, optimizer_bytes: int, *, can_accumulate: bool) -> None:
        """Records what steps do not say. All ranks call it after the same step."""
        usable = 0 if self.device_memory is None else self.device_memory.usable()
        own = (*self._memory, usable, self._saved.per_sample)
        gathered = self._group.gather([float(one) for one in own]).wait()
        self._facts |= {
            "can_accumulate": can_accumulate,
            "memory_bytes": [[int(one) for one in rank[:3]] for rank in gathered],
            "optimizer_bytes": optimizer_bytes,
            "sample_bytes": int(max(rank[3] for rank in gathered)),
        }
        if self.wish.is_joint and gradient_bytes and self._group.ranks > 1:
            self._facts |= _Exchanges(self._group, self._nodes, gradient_bytes, self.wish.limit_s).measured()
        self._record()

    def refuse(self, problem: str) -> NoReturn:
        self._facts["problem"] = problem
        self._record()
        if self._metrics is not None:
            self._metrics.close()
        leave()

    def _record(self) -> None:
        if self._metrics is not None:
            kind = "joint" if self.wish.is_joint else "solo"
            self._metrics.put({"kind": "trial", "mode": kind, **self._facts})

    def _look_at_memory(self, step: int) -> None:
        if self._group.device.type != "cuda":
            return
        import torch

        place = step // _BLOCK % 2
        self._memory[place] = max(self._memory[place], torch.cuda.max_memory_allocated(self._group.device))
        torch.cuda.reset_peak_memory_stats(self._group.device)


class _Exchanges:
    """Times the exchange of gradients by itself: between all ranks, and between the nodes two by two."""

    def __init__(self, group: Group, nodes: Sequence[str], size_bytes: int, limit_s: float) -> None:
        import torch

        self._group = group
        self._limit_s = limit_s
        self._first = [nodes.index(node) for node in dict.fromkeys(nodes)]  # the first rank of each node
        count = max(1, size_bytes // 4)
        self._parts = torch.zeros(count, device=group.device).split(_BUCKET // 4)

    def measured(self) -> dict[str, Any]:
        whole_s = self._common(self._timed(None))
        pairs = self._pairs()
        # All ranks have the same number here, and come to the same decision.
        if len(self._first) < 3 or whole_s * len(pairs) * (_EXCHANGES + 1) > self._limit_s:
            pairs = [] if len(self._first) != 2 else [(self._first[0], self._first[1])]
        found = [(one, other, self._between(one, other)) for one, other in pairs]
        return {"exchange_s": whole_s, "pairs": [list(pair) for pair in found]}

    def _pairs(self) -> list[tuple[int, int]]:
        if len(self._first) <= _MOST_NODES_PAIRED:
            return list(combinations(self._first, 2))
        return [(self._first[0], other) for other in self._first[1:]]

    def _between(self, one: int, other: int) -> float:
        from torch import distributed

        pair = distributed.new_group([one, other])  # called by all ranks
        seconds = self._timed(pair) if self._group.rank in (one, other) else 0.0
        return self._common(seconds)

    def _timed(self, group: Any) -> float:
        """The median; the first exchange connects and does not count."""
        taken = [self._exchange(group) for _ in range(_EXCHANGES + 1)]
        return statistics.median(taken[1:])

    def _exchange(self, group: Any) -> float:
        from torch import distributed

        distributed.barrier(group=group)
        self._settle()
        begun = time.perf_counter()
        works = [distributed.all_reduce(part, group=group, async_op=True) for part in self._parts]
        for work in works:
            work.wait()
        self._settle()
        return time.perf_counter() - begun

    def _settle(self) -> None:
        if self._group.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._group.device)

    def _common(self, seconds: float) -> float:
        return max(one for (one,) in self._group.gather([seconds]).wait())


def leave() -> NoReturn:
    """Ends the process at once: nothing that the script would still do or write happens."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
