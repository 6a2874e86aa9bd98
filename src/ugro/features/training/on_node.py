"""Measures the energy that the devices of a run use while it holds them, in a process of its own.

A driver may hang or crash, so the supervisor never touches one: the meter is a child of it, holds none of its files,
and ends with it. What it finds is appended to the run's ``energy.jsonl``, each line with the sums since the start, so
that a lost link or a lost line loses no energy:

    {"s": 12.0, "time": 1700000000.5, "devices": {"gpu0": [3021.5, 11.9, "counter"]}}

``s`` is the time since the start, by a clock that nobody sets; then joules, measured seconds and the source of each
device. A device that cannot be read is not in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional

from ugro.node import durable
from ugro.node.clock import clock_s
from ugro.node.hardware.gpu_locks import Device
from ugro.node.hardware.probe import has_gpu_hint
from ugro.node.process import process_tree, terminate
from ugro.node.process.execute import close_all_but, is_readable
from ugro.node.runs.rundir import RunDir
from ugro.node.runs.runspec import RunSpec

# --- energy -----------------------------------------------------------------------------------------------------------
# How much energy a device has used: from a counter where it has one, else from its power over time.
#
# A counter that goes on by itself misses nothing between two readings. Power between two readings is taken as a
# straight line, and only while they are close: a longer gap is not filled, and does not count as measured.


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


# --- meter ------------------------------------------------------------------------------------------------------------


ENERGY = "energy.jsonl"  # in the folder of a run
LAST_S = 1.0  # for the last reading, when the run is over; then the meter is killed
_POWER_EVERY_S = {"nvml": 1.0}  # other sources start a program for each reading
_TOOL_EVERY_S = 5.0
_LONGEST_GAP_S = 3 * _TOOL_EVERY_S
_WRITE_S, _LONGEST_WRITE_S = 2.0, 60.0
_PART = 200  # a line each half percent of the run's time so far


class Meter:
    """The supervisor's side."""

    def __init__(self, pid: int, orders: int, done: int) -> None:
        self.pid = pid
        self._orders = orders
        self._done = done

    @classmethod
    def start(cls, run: RunDir, spec: RunSpec) -> Optional[Meter]:
        """None where nothing can be measured. The run starts all the same."""
        gpus = spec.gpus if has_gpu_hint() else []
        if spec.is_shared or not (gpus or packages()):
            return None
        with contextlib.suppress(OSError):
            return cls._fork(run, spec, gpus)
        return None

    @classmethod
    def _fork(cls, run: RunDir, spec: RunSpec, gpus: List[Device]) -> Meter:
        # All that may fail comes before the fork: an error must not let the child go on as a second supervisor.
        devices, supervisor = _Devices(gpus, _cpu_share(spec)), os.getpid()
        pipes: List[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            orders_read, orders, done, done_write = pipes
            theirs = sorted((orders_read, done_write))
            pid = os.fork()
        except OSError:
            for fd in pipes:
                os.close(fd)
            raise
        if pid == 0:
            _serve(run, devices, theirs, supervisor)
        os.close(orders_read)
        os.close(done_write)
        return cls(pid, orders, done)

    def finish(self, within_s: float = LAST_S) -> None:
        """It reads once more and ends; one that hangs in its driver is killed."""
        os.close(self._orders)
        if not is_readable(self._done, within_s):
            terminate.kill_child(self.pid)
        os.close(self._done)


def _cpu_share(spec: RunSpec) -> float:
    """By its cores. A run that asked for none may use all of them."""
    return 1.0 if spec.cpus is None else min(1.0, spec.cpus / (os.cpu_count() or 1))


class _Devices:
    """Those of one run, with what each has used since it was first read."""

    def __init__(self, gpus: List[Device], cpu_share: float) -> None:
        self._gpus = gpus
        self._meters = {device.number: EnergyMeter(_LONGEST_GAP_S) for device in gpus}
        self._cpu_share = cpu_share
        self._cpu: Optional[CpuMeter] = None
        self._sources: Any = None
        self.every_s = _LONGEST_WRITE_S  # the pause until the next reading, at most

    def open(self) -> None:
        """In the meter's own process: drivers are loaded here."""
        from ugro.node.hardware import gpus

        self._cpu = CpuMeter(self._cpu_share)
        self._sources = gpus.sources() if self._gpus else None

    def read(self) -> None:
        if self._cpu is not None:
            self._cpu.read(clock_s())
        if self._sources is None:
            return
        answer = self._sources.sample()
        now_s = clock_s()
        by_uuid = {gpu["uuid"]: gpu for gpu in answer["gpus"] if gpu["uuid"]}
        by_index = {gpu["index"]: gpu for gpu in answer["gpus"]}
        has_counters = True
        for device in self._gpus:
            gpu = by_uuid.get(device.uuid) if device.uuid else by_index.get(device.number)
            has_counters = has_counters and gpu is not None and gpu["energy_j"] is not None
            if gpu is not None:
                self._meters[device.number].add(Reading(now_s, gpu["energy_j"], gpu["power_w"]))
        self.every_s = (
            _LONGEST_WRITE_S if has_counters else _POWER_EVERY_S.get(answer["source"] or "", _TOOL_EVERY_S)
        )

    def sums(self) -> Dict[str, List[Any]]:
        meters: Dict[str, Any] = {"gpu%d" % number: meter for number, meter in self._meters.items()}
        if self._cpu:
            meters["cpu"] = self._cpu
        return {
            name: [round(meter.joules, 3), round(meter.measured_s, 3), meter.source]
            for name, meter in meters.items()
            if meter.source is not None
        }


def _serve(run: RunDir, devices: _Devices, pipes: List[int], supervisor: int) -> NoReturn:
    """``pipes``: the one with orders, and the one whose end says that it is done."""
    try:
        process_tree.die_with_parent()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the supervisor acts on those
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # First of all: the run's lock must not outlive the supervisor in here.
        close_all_but(pipes)
        if os.getppid() == supervisor:
            _measure(run.file(ENERGY), devices, pipes[0])
    finally:
        os._exit(0)


def _measure(path: str, devices: _Devices, orders: int) -> None:
    began_s = clock_s()
    devices.open()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    write_at = began_s + _WRITE_S
    is_over = False
    while not is_over:
        devices.read()
        now_s = clock_s()
        if now_s >= write_at:
            write_at = now_s + _pause_s(now_s - began_s)
            _write(fd, now_s - began_s, devices)
        is_over = is_readable(orders, min(devices.every_s, max(0.0, write_at - now_s)))
    devices.read()
    _write(fd, clock_s() - began_s, devices)


def _pause_s(passed_s: float) -> float:
    return min(_LONGEST_WRITE_S, max(_WRITE_S, passed_s / _PART))


def _write(fd: int, passed_s: float, devices: _Devices) -> None:
    line = {"s": round(passed_s, 3), "time": round(time.time(), 3), "devices": devices.sums()}
    with contextlib.suppress(OSError):  # a full disk: the next line has these sums, too
        durable.write_all(fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
