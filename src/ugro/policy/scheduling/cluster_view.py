"""The scheduler's input: nodes, waiting jobs, jobs that hold devices. Times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ugro.core.job import JobSpec, JobState, Placement

# When a job that has been told to stop, or is past its limit, is taken to be gone. Most are quicker.
STOPPING_S = 30.0


@dataclass(frozen=True, slots=True)
class GpuView:
    index: int
    model: str
    memory_bytes: int | None = None
    is_foreign: bool = False  # a process that is not ours uses it
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    cores: int
    memory_bytes: int
    gpus: tuple[GpuView, ...] = ()
    labels: tuple[str, ...] = ()
    speed: float = 1.0  # against the other nodes, where it was measured; more is faster
    group: str = ""  # nodes of one group are close to each other: the same subnet or switch
    # Why it takes no new work, as words after its name: "is drained: new fans", "is unreachable".
    unusable: str | None = None
    cost: float = 0.0  # how busy it is, as ``selection`` counts it; less is better
    is_known: bool = True  # False: it has not said yet what it has; only its labels are sure
    is_awaited: bool = False  # its very first answer is still on its way


@dataclass(frozen=True, slots=True)
class Waiting:
    id: int
    user: str
    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    attempt: int = 0
    not_before: float | None = None  # the end of the pause before the next attempt
    avoid: tuple[str, ...] = ()  # nodes that failed it; taken only when no others are free


@dataclass(frozen=True, slots=True)
class Holding:
    id: int
    user: str
    priority: int
    placement: Placement
    submitted_at: float
    started_at: float | None = None
    time_limit_s: float | None = None
    is_preemptible: bool = False
    is_stopping: bool = False
    expected_end: float | None = None  # where more is known than the time limit

    @property
    def devices(self) -> int:
        return devices_of(self.placement)

    def end(self, now: float) -> float | None:
        """When it ends at the latest, as far as we know; never in the past."""
        if self.is_stopping:
            return now + STOPPING_S
        end = self.expected_end
        if end is None and self.time_limit_s is not None:
            end = (now if self.started_at is None else self.started_at) + self.time_limit_s
        if end is None:
            return None
        return end if end > now else now + STOPPING_S


@dataclass(frozen=True, slots=True)
class ClusterView:
    now: float
    nodes: tuple[NodeView, ...] = ()
    waiting: tuple[Waiting, ...] = ()  # in any order; where ``WaitingJobs`` has them from pass to pass, none are here
    holding: tuple[Holding, ...] = ()
    ended: Mapping[int, JobState] = field(default_factory=dict)  # at least the jobs that a waiting one comes after


def devices_of(placement: Placement) -> int:
    """What counts against a user: its GPUs, and a node without any as one."""
    return sum(max(1, len(share.gpus)) for share in placement.shares)
