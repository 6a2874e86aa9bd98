"""What the devices of a job used, and the lines in which a node reports it. Pure: lines in, samples out.

Lines come from a node and are not trusted: invalid and impossible ones are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ugro.core.training import document

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
