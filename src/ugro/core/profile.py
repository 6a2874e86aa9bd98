"""Where a training's steps spend their time on each rank, and what slows it down, as a client sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.core.training import PipelineRecord


class FindingKind(StrEnum):
    BALANCED = "balanced"
    FEWER_RANKS = "fewer_ranks"  # it would be faster without some ranks
    SLOW_RANK = "slow_rank"
    UNSTEADY = "unsteady"  # another rank is the slowest in every step
    NETWORK = "network"
    INPUT = "input"
    SCRIPT = "script"  # work between the parts of a step
    FIXED_COST = "fixed_cost"  # work that does not depend on the number of samples
    PIPELINE = "pipeline"  # how the layers are spread, and what was predicted
    ENERGY = "energy"  # a rank adds less than its share of the energy
    TOO_EARLY = "too_early"


@dataclass(frozen=True, slots=True)
class Finding:
    kind: FindingKind
    words: str
    remedy: str = ""
    share: float = 0.0  # what it costs, as a share of the devices' time
    ranks: tuple[int, ...] = ()  # the ranks concerned; empty: all


@dataclass(frozen=True, slots=True)
class RankProfile:
    """Means over the steps. The parts add up to a step; ``own_s`` is all but waiting and communication."""

    rank: int
    node: str
    samples: float
    own_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    other_s: float
    waiting_s: float
    communication_s: float
    watts: float | None = None  # of its device, in these steps; None: not measured
    samples_per_joule: float | None = None


@dataclass(frozen=True, slots=True)
class JobProfile:
    attempt: int
    first_step: int
    last_step: int
    epoch: int
    steps: int  # that are counted
    passed_over: int  # not counted: steps disturbed by a checkpoint or the like, and short batches
    step_s: float
    samples_per_s: float
    imbalance: float  # the slowest rank's own time relative to the mean
    lost_s: float  # device-seconds of waiting for others, in the counted steps
    lost_share: float
    use: float  # the share of time in which devices compute
    loss: float | None
    mode: str
    device: str
    ranks: tuple[RankProfile, ...]
    findings: tuple[Finding, ...]  # the most expensive first
    watts: float | None = None  # of all devices; None: one of them was not measured
    samples_per_joule: float | None = None
    pipeline: PipelineRecord | None = None  # None: every rank has all layers

    @property
    def verdict(self) -> Finding:
        return self.findings[0]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The steps that a rank recorded on request, or why it could not."""

    rank: int
    step: int
    node: str
    path: str
    bytes: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class TraceRequest:
    job: int
    attempt: int
    ranks: int
    steps: int
