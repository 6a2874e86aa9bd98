"""Where the time of a training's steps goes, on each rank, and what holds it back: as a client sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    BALANCED = "balanced"
    FEWER_RANKS = "fewer_ranks"  # it would be faster without some of them
    SLOW_RANK = "slow_rank"
    UNSTEADY = "unsteady"  # another rank is the slowest in every step
    NETWORK = "network"
    INPUT = "input"
    SCRIPT = "script"  # what is done between the parts of a step
    FIXED_COST = "fixed_cost"  # what does not depend on the number of samples
    TOO_EARLY = "too_early"


@dataclass(frozen=True, slots=True)
class Finding:
    kind: FindingKind
    words: str
    remedy: str = ""
    share: float = 0.0  # of the devices' time, what it costs
    ranks: tuple[int, ...] = ()  # that it is about; empty: all


@dataclass(frozen=True, slots=True)
class RankProfile:
    """The mean over the steps. The parts add up to a step; ``own_s`` is all but waiting and communication."""

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


@dataclass(frozen=True, slots=True)
class JobProfile:
    attempt: int
    first_step: int
    last_step: int
    epoch: int
    steps: int  # that are counted
    passed_over: int  # disturbed ones, as by a checkpoint, and short batches
    step_s: float
    samples_per_s: float
    imbalance: float  # the slowest rank's own time against the mean
    lost_s: float  # device-seconds of waiting for others, in the counted steps
    lost_share: float
    use: float  # the share of their time in which devices compute
    loss: float | None
    mode: str
    device: str
    ranks: tuple[RankProfile, ...]
    findings: tuple[Finding, ...]  # what costs most first

    @property
    def verdict(self) -> Finding:
        return self.findings[0]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """What a rank recorded of some steps on request; or why it could not."""

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
