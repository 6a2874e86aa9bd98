"""Times the parts of a step on this rank's device, and separates computing from waiting for other ranks.

All-reduce makes the backward of all ranks equally long, so a rank's own time ends when its last gradients are ready. On
a GPU the moments are events in its stream and are read a step later, so measuring never stops the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


class CpuClock:
    lag = 0  # steps after which moments can be compared

    def now(self) -> Any:
        return time.perf_counter()

    def between(self, earlier: Any, later: Any) -> float:
        return float(later - earlier)

    def kept(self, loss: Any) -> Any:
        return loss.detach()


class CudaClock:
    lag = 1

    def now(self) -> Any:
        import torch

        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def between(self, earlier: Any, later: Any) -> float:
        later.synchronize()  # of the previous step: the GPU has other work meanwhile
        return float(earlier.elapsed_time(later)) / 1000

    def kept(self, loss: Any) -> Any:
        """Copies to the host now. A later copy would wait for all work that was queued since."""
        import torch

        return torch.empty_like(loss, device="cpu", pin_memory=True).copy_(loss.detach(), non_blocking=True)


@dataclass(slots=True)
class Moments:
    """The moments of one step. ``own`` starts when the previous step was synchronised, and includes its optimizer."""

    step: int
    share: int = 0
    micro_batches: int = 1
    since: Any = None
    begun: Any = None
    forward_done: Any = None
    backward_begun: Any = None
    ready: Any = None
    synced: Any = None
    ended: Any = None
    data_s: float = 0.0
    inner_wait_s: float = 0.0  # waiting for other ranks inside forward and backward (synchronised BatchNorm)
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # the same where a model is spread over the ranks
    is_clean: bool = True
    loss: Any = None


@dataclass(frozen=True, slots=True)
class Phases:
    own_s: float
    data_s: float
    forward_s: float
    backward_s: float


def phases(clock: CpuClock | CudaClock, moments: Moments) -> Phases:
    """The durations of a step whose gradients are ready."""
    begun = moments.begun
    forward_done = moments.forward_done or moments.backward_begun or moments.ready
    backward_begun = moments.backward_begun or forward_done
    since = begun if moments.since is None else moments.since
    return Phases(
        max(0.0, clock.between(since, moments.ready) - moments.inner_wait_s - waited_s(clock, moments)),
        moments.data_s,
        clock.between(begun, forward_done),
        max(0.0, clock.between(backward_begun, moments.ready)),
    )


def after_ready(clock: CpuClock | CudaClock, moments: Moments) -> tuple[float, float]:
    """The durations after that: until the gradients of all ranks arrived, and the optimizer.

    Exchanges inside forward and backward count as if all of them came after it.
    """
    if moments.synced is None:
        return 0.0, 0.0
    optimizer_s = clock.between(moments.synced, moments.ended) if moments.ended is not None else 0.0
    return clock.between(moments.ready, moments.synced) + waited_s(clock, moments), optimizer_s


def waited_s(clock: CpuClock | CudaClock, moments: Moments) -> float:
    return sum(clock.between(before, after) for before, after in moments.waits)
