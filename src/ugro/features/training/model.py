"""Energy that the devices of a job used, as nodes report it; the headline of a job; its profile. Pure.

Lines come from a node and are not trusted: invalid and impossible ones are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ugro.kernel.telemetry.records import PipelineRecord, document

CPU = "cpu"
SOURCES = ("counter", "power", "counter and power")
_MOST_DEVICES = 64
_LONGEST_NAME = 12
_MOST_W = 20_000.0  # of one device: more than any has
_MOST_S = 1e9
_LAST_UNIX_S = 2.0**40
_SLACK_S = 2.0  # counters are read now and then, not at once


@dataclass(frozen=True, slots=True)
class DeviceSum:
    """Since the start of the run."""

    joules: float
    measured_s: float
    source: str


@dataclass(frozen=True, slots=True)
class EnergySample:
    passed_s: float  # since the start of the run
    time_s: float  # unix seconds of the node's wall clock
    devices: Mapping[str, DeviceSum]

    @property
    def joules(self) -> float:
        return math.fsum(one.joules for one in self.devices.values())


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """A device of the attempt: ``gpu0``, or ``cpu`` for all packages of the machine."""

    node: str
    device: str
    joules: float
    measured_s: float
    held_s: float
    source: str  # counter, power, or both
    ranks: tuple[int, ...] = ()  # that used it


@dataclass(frozen=True, slots=True)
class RankEnergy:
    rank: int
    node: str
    joules: float
    is_shared: bool = False  # a device that several ranks use counts for each of them in equal parts


@dataclass(frozen=True, slots=True)
class EpochEnergy:
    epoch: int
    seconds: float
    joules: float


@dataclass(frozen=True, slots=True)
class JobEnergy:
    """Gross: all that its devices drew while it held them, also while they were idle."""

    joules: float  # of all attempts
    wh: float
    attempt: int  # that the rest is about
    measured_share: float  # of the time that its devices were held
    words: str
    cost: float | None = None  # None: no price is configured
    currency: str | None = None
    devices: tuple[DeviceEnergy, ...] = ()
    ranks: tuple[RankEnergy, ...] = ()
    epochs: tuple[EpochEnergy, ...] = ()


def read_samples(lines: Iterable[bytes]) -> list[EnergySample]:
    """In the order of time. Sums never fall: a line in which one does is skipped."""
    found: list[EnergySample] = []
    for line in lines:
        sample = _sample(line)
        if sample is not None and (not found or _follows(found[-1], sample)):
            found.append(sample)
    return found


def _follows(last: EnergySample, sample: EnergySample) -> bool:
    if sample.passed_s < last.passed_s:
        return False
    now = sample.devices
    return all(name in now and now[name].joules >= one.joules for name, one in last.devices.items())


def _sample(line: bytes) -> EnergySample | None:
    record = document(line)
    devices = record.get("devices") if record is not None else None
    if record is None or not isinstance(devices, dict) or len(devices) > _MOST_DEVICES:
        return None
    passed_s, time_s = _number(record.get("s"), _MOST_S), _number(record.get("time"), _LAST_UNIX_S)
    if passed_s is None or time_s is None:
        return None
    sums = {str(name): _sum(one, passed_s) for name, one in devices.items() if _is_device(name)}
    return EnergySample(passed_s, time_s, {name: one for name, one in sums.items() if one is not None})


def _is_device(name: str) -> bool:
    number = name.removeprefix("gpu")
    return name == CPU or (name != number and len(name) <= _LONGEST_NAME and number.isascii() and number.isdecimal())


def _sum(value: object, passed_s: float) -> DeviceSum | None:
    if not isinstance(value, list) or len(value) != 3 or value[2] not in SOURCES:
        return None
    measured_s = _number(value[1], passed_s + _SLACK_S)
    joules = _number(value[0], _MOST_W * (passed_s + _SLACK_S))
    return DeviceSum(joules, min(measured_s, passed_s), value[2]) if joules is not None and measured_s else None


def _number(value: object, most: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        return None
    return float(value)


# --- headline ---------------------------------------------------------------------------------------------------------
# A training in one line: how far it is, how long it still takes, its loss, its speed, the use of its devices.


@dataclass(frozen=True, slots=True)
class JobProgress:
    words: str  # "step 450 of 1,000"
    left_words: str  # "1m15s left", or why that is not known
    done: float | None = None  # steps, or epochs
    total: float | None = None
    left_s: float | None = None
    source: str = ""  # what told the total
    stalled_s: float | None = None  # since the last step, if that is unusually long

    @property
    def share(self) -> float | None:
        if self.done is None or not self.total:
            return None
        return min(1.0, max(0.0, self.done / self.total))


@dataclass(frozen=True, slots=True)
class LossLine:
    name: str
    last: float | None
    best: float | None
    values: tuple[float | None, ...] = ()  # for a small curve, oldest first


@dataclass(frozen=True, slots=True)
class Speed:
    value: float
    name: str  # "samples/s", "tokens/s", "steps/s"


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Shares from 0 to 1. ``gpus`` counts the job's GPUs; without any, ``computing`` is the share of time."""

    gpus: int = 0
    use: float | None = None
    memory: float | None = None
    computing: float | None = None


@dataclass(frozen=True, slots=True)
class Headline:
    job: int
    attempt: int
    is_final: bool
    duration_s: float | None
    words: str  # all of it, for one line of a terminal
    progress: JobProgress | None = None
    loss: LossLine | None = None
    speed: Speed | None = None
    devices: DeviceUse | None = None
    energy: JobEnergy | None = None


# --- profile ----------------------------------------------------------------------------------------------------------
# Where a training's steps spend their time on each rank, and what slows it down, as a client sees it.


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
