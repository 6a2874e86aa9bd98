"""Times the parts of a step on this rank's device, and separates computing from waiting for other ranks.

All-reduce makes the backward of all ranks equally long, so a rank's own time ends when its last gradients are ready. On
a GPU the moments are events in its stream and are read a step later, so measuring never stops the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol


class Clock(Protocol):
    """Moments in the order of a device's work, which may be done long after the host has asked for it."""

    lag: int  # steps after which moments can be compared

    def now(self) -> Any: ...
    def has_come(self, moment: Any) -> bool:
        """Returns whether the device has done all that was asked of it before the moment. Does not wait."""
        ...

    def wait(self, moment: Any) -> None:
        """Waits until the device has done all that was asked of it before the moment."""
        ...

    def between(self, earlier: Any, later: Any) -> float:
        """Returns seconds. Waits until the device has reached the later moment."""
        ...

    def kept(self, loss: Any) -> Any: ...


class CpuClock:
    lag = 0

    def now(self) -> Any:
        return time.perf_counter()

    def has_come(self, moment: Any) -> bool:
        return True

    def between(self, earlier: Any, later: Any) -> float:
        return float(later - earlier)

    def kept(self, loss: Any) -> Any:
        return loss.detach()

    def wait(self, moment: Any) -> None:
        return


class CudaClock:
    lag = 1

    def now(self) -> Any:
        import torch

        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def has_come(self, moment: Any) -> bool:
        return bool(moment.query())

    def between(self, earlier: Any, later: Any) -> float:
        later.synchronize()  # of the previous step: the GPU has other work meanwhile
        return float(earlier.elapsed_time(later)) / 1000

    def kept(self, loss: Any) -> Any:
        """Copies to the host now. A later copy would wait for all work that was queued since."""
        import torch

        return torch.empty_like(loss, device="cpu", pin_memory=True).copy_(loss.detach(), non_blocking=True)

    def wait(self, moment: Any) -> None:
        moment.synchronize()


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
    fetched: tuple[Any, Any] | None = None  # before and after the device waited for its batch
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # for other ranks, inside forward and backward
    pauses: list[tuple[Any, Any]] = field(default_factory=list)  # in which the ranks did something else together
    is_clean: bool = True
    loss: Any = None
    gradients: Any = None  # the sum of all numbers in them: finite, if they are
    is_scaled: bool = False  # by a GradScaler


@dataclass(frozen=True, slots=True)
class Phases:
    own_s: float
    data_s: float
    forward_s: float
    backward_s: float


def phases(clock: Clock, moments: Moments) -> Phases:
    """The durations of a step whose gradients are ready."""
    begun = moments.begun
    forward_done = moments.forward_done or moments.backward_begun or moments.ready
    backward_begun = moments.backward_begun or forward_done
    since = begun if moments.since is None else moments.since
    others_s = _sum_s(clock, moments.waits) + _sum_s(clock, moments.pauses)
    return Phases(
        max(0.0, clock.between(since, moments.ready) - others_s),
        data_s(clock, moments),
        clock.between(begun, forward_done),
        max(0.0, clock.between(backward_begun, moments.ready)),
    )


def data_s(clock: Clock, moments: Moments) -> float:
    """Returns how long the device stood still for its batch: nothing while it still computes what was asked before."""
    return 0.0 if moments.fetched is None else clock.between(*moments.fetched)


def after_ready(clock: Clock, moments: Moments) -> tuple[float, float]:
    """The durations after that: until the gradients of all ranks arrived, and the optimizer.

    Exchanges inside forward and backward count as if all of them came after it.
    """
    if moments.ready is None or moments.synced is None:  # the first: memory ran out, and the step was repeated
        return 0.0, 0.0
    optimizer_s = clock.between(moments.synced, moments.ended) if moments.ended is not None else 0.0
    return clock.between(moments.ready, moments.synced) + _sum_s(clock, moments.waits), optimizer_s


def _sum_s(clock: Clock, spans: list[tuple[Any, Any]]) -> float:
    return sum(clock.between(before, after) for before, after in spans)
