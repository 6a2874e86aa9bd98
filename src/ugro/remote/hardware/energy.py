"""How much energy a device has used: from a counter where it has one, else from its power over time.

A counter that goes on by itself misses nothing between two readings. Power between two readings is taken as a straight
line, and only while they are close: a longer gap is not filled, and does not count as measured.
"""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Optional

POWERCAP = "/sys/class/powercap"
POWERCAP_VARIABLE = "UGRO_POWERCAP"  # another folder, for tests

COUNTER, POWER, BOTH = "counter", "power", "counter and power"


class Reading(NamedTuple):
    at_s: float  # of a clock that nobody sets
    counter_j: Optional[float] = None
    power_w: Optional[float] = None


class EnergyMeter:
    """Of one device, from its first reading on."""

    def __init__(self, longest_gap_s: float, wraps_at_j: Optional[float] = None) -> None:
        """``wraps_at_j``: where its counter begins at zero again; None: only when its driver is loaded again."""
        self._longest_gap_s = longest_gap_s
        self._wraps_at_j = wraps_at_j
        self._last: Optional[Reading] = None
        self.joules = 0.0
        self.counted_s = 0.0
        self.integrated_s = 0.0

    @property
    def measured_s(self) -> float:
        return self.counted_s + self.integrated_s

    @property
    def source(self) -> Optional[str]:
        """None: nothing was measured."""
        if not self.measured_s:
            return None
        return POWER if not self.counted_s else BOTH if self.integrated_s else COUNTER

    def add(self, reading: Reading) -> None:
        last, self._last = self._last, reading
        if last is None or reading.at_s <= last.at_s:
            return
        passed_s = reading.at_s - last.at_s
        counted_j = self._counted_j(last, reading)
        if counted_j is not None:
            self.joules += counted_j
            self.counted_s += passed_s
        elif last.power_w is not None and reading.power_w is not None and passed_s <= self._longest_gap_s:
            self.joules += (last.power_w + reading.power_w) / 2 * passed_s
            self.integrated_s += passed_s

    def _counted_j(self, last: Reading, reading: Reading) -> Optional[float]:
        if last.counter_j is None or reading.counter_j is None:
            return None
        used_j = reading.counter_j - last.counter_j
        if used_j < 0:
            # Without a known end it has begun again, and nobody knows what it had counted by then.
            return used_j + self._wraps_at_j if self._wraps_at_j is not None else None
        return used_j


class Package(NamedTuple):
    """The counter of one CPU package (RAPL)."""

    path: str
    wraps_at_j: float

    def counter_j(self) -> Optional[float]:
        number = _number(os.path.join(self.path, "energy_uj"))
        return None if number is None else number / 1e6


def packages() -> List[Package]:
    """Those whose counters this user may read: on most systems root alone may."""
    folder = os.environ.get(POWERCAP_VARIABLE) or POWERCAP
    try:
        zones = sorted(os.listdir(folder))
    except OSError:
        return []
    found = []
    for zone in zones:
        path = os.path.join(folder, zone)
        # A part of a package (zone:0:0) is counted with it; psys is the whole machine, and few have it.
        wraps_at = _number(os.path.join(path, "max_energy_range_uj"))
        is_package = zone.count(":") == 1 and _text(os.path.join(path, "name")).startswith("package")
        if is_package and wraps_at and _number(os.path.join(path, "energy_uj")) is not None:
            found.append(Package(path, wraps_at / 1e6))
    return found


class CpuMeter:
    """All CPU packages of this machine together; ``share``: how much of them is charged."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        # The gap is never too long for a counter.
        self._meters: Dict[Package, EnergyMeter] = {one: EnergyMeter(0.0, one.wraps_at_j) for one in packages()}

    def __bool__(self) -> bool:
        return bool(self._meters)

    def read(self, now_s: float) -> None:
        for package, meter in self._meters.items():
            meter.add(Reading(now_s, package.counter_j()))

    @property
    def joules(self) -> float:
        return self._share * sum(meter.joules for meter in self._meters.values())

    @property
    def measured_s(self) -> float:
        """Of the package that was measured least."""
        return min((meter.measured_s for meter in self._meters.values()), default=0.0)

    @property
    def source(self) -> Optional[str]:
        return COUNTER if self.measured_s else None


def _number(path: str) -> Optional[int]:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(200).strip()
    except OSError:
        return ""
