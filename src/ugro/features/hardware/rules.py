"""Decides from measured figures: how fast nodes are, how long a measurement may take, and which device became worse.

One low run proves nothing: a neighbour on the machine, a quota, a full cache. Two in a row, both far below the median
of the runs before, do. Runs that were forced on a busy node count neither way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ugro.features.hardware.model import PRECISIONS, DeviceFigures, Mode, NodeFigures, Part
from ugro.features.power.model import OwnerReport
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.links.model import Facts, Gpu
from ugro.kernel.support.quantities import format_size

# --- speed ------------------------------------------------------------------------------------------------------------
# How fast nodes are, relative to each other, by what was measured: chooses among nodes that are equal otherwise.


# The order in which a common figure is looked for: what trainings use most comes first.
PREFERRED = ("fp16", "bf16", "tf32", "fp32")
_STEP = 1.15  # what differs by less is equal: measurements repeat no better


def common_rates(devices: Sequence[DeviceFigures | None]) -> tuple[list[float], str] | None:
    """The first precision that was measured on all of them, and its figures."""
    known = [device for device in devices if device is not None]
    if not known or len(known) < len(devices):
        return None
    for precision in PREFERRED:
        rates = [rate for device in known if (rate := device.rate(precision))]
        if len(rates) == len(known):
            return rates, precision
    return None


def common_cpu_rates(nodes: Sequence[NodeFigures | None]) -> tuple[list[float], str] | None:
    """PyTorch's products on the CPU, or else what all measured alike."""
    known = [node for node in nodes if node is not None]
    if not known or len(known) < len(nodes):
        return None
    if (found := common_rates([node.device("cpu") for node in known])) is not None:
        return found
    rates = [node.cpu.all_cores_bytes_per_s for node in known if node.cpu is not None]
    return (rates, "compression") if len(rates) == len(known) and all(rates) else None


def node_speeds(nodes: Mapping[str, Sequence[str]], measured: Mapping[str, NodeFigures]) -> dict[str, float]:
    """By node, at most 1, in steps. ``nodes``: the GPUs that each has, by uuid.

    Nodes with GPUs and nodes without are compared among themselves, and only if all of them were measured: a node of
    which nothing is known is neither fast nor slow.
    """
    with_gpus = [name for name, gpus in nodes.items() if gpus]
    without = [name for name, gpus in nodes.items() if not gpus]
    found = {**_by_gpus(with_gpus, nodes, measured), **_by_cpu(without, measured)}
    return {name: found.get(name, 1.0) for name in nodes}


def _by_gpus(
    names: Sequence[str], nodes: Mapping[str, Sequence[str]], measured: Mapping[str, NodeFigures]
) -> dict[str, float]:
    places = [(name, uuid) for name in names for uuid in nodes[name]]
    devices = [measured[name].device(uuid) if name in measured else None for name, uuid in places]
    if (found := common_rates(devices)) is None:
        return {}
    slowest: dict[str, float] = {}
    for (name, _), rate in zip(places, found[0], strict=True):
        slowest[name] = min(rate, slowest.get(name, math.inf))
    return _in_steps(slowest)


def _by_cpu(names: Sequence[str], measured: Mapping[str, NodeFigures]) -> dict[str, float]:
    found = common_cpu_rates([measured.get(name) for name in names])
    return _in_steps(dict(zip(names, found[0], strict=True))) if found else {}


def _in_steps(rates: Mapping[str, float]) -> dict[str, float]:
    fastest = max(rates.values())
    return {name: _STEP ** math.trunc(math.log(rate / fastest, _STEP)) for name, rate in rates.items()}


# --- hardware speed ---------------------------------------------------------------------------------------------------
# Estimates how fast a job's devices are: ``balance: static`` takes its shares from here.
#
# By what ``ugro node bench`` measured, if all of them were; else by their model names, with figures of the vendors. A
# training may see other ratios, which ``adaptive`` then finds.


# TFLOPS as stated by vendors: dense half precision with single-precision sums; single precision without tensor cores.
_TFLOPS = {
    **{"h200": 989, "h100": 756, "a100": 312, "l40s": 362, "l40": 181, "l4": 121, "a40": 150, "a10": 125, "t4": 65},
    **{"v100": 112, "p100": 9.5, "rtxa6000": 155, "rtxa5000": 111, "rtxa4000": 77, "rtx6000ada": 364},
    **{"rtx5090": 210, "rtx5080": 113, "rtx5070ti": 88, "rtx5070": 62, "rtx5060ti": 47, "rtx5060": 38},
    **{"rtx4090": 165, "rtx4080super": 104, "rtx4080": 97, "rtx4070tisuper": 88, "rtx4070ti": 80},
    **{"rtx4070super": 71, "rtx4070": 58, "rtx4060ti": 44, "rtx4060": 30},
    **{"rtx3090ti": 80, "rtx3090": 71, "rtx3080ti": 68, "rtx3080": 60, "rtx3070ti": 43.5, "rtx3070": 41},
    **{"rtx3060ti": 32, "rtx3060": 25, "rtx2080ti": 54, "rtx2080super": 45, "rtx2080": 40, "rtx2070super": 36},
    **{"rtx2070": 30, "rtx2060super": 29, "rtx2060": 26, "gtx1080ti": 11.3, "gtx1080": 8.9, "gtx1070": 6.5},
}
# The same for laptops, from their cores at a common boost clock; the real speed depends on their power limit.
_LAPTOP_TFLOPS = {
    **{"rtx5090": 66, "rtx5080": 46, "rtx5070ti": 40, "rtx5070": 31, "rtx5060": 24},
    **{"rtx4090": 66, "rtx4080": 50, "rtx4070": 38, "rtx4060": 26, "rtx4050": 22},
    **{"rtx3080ti": 42, "rtx3080": 35, "rtx3070ti": 33, "rtx3070": 29, "rtx3060": 23},
}
_CLOCK = re.compile(r"@ *([\d.]+) *GHz", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on: a GPU, or the cores of a node without one."""

    gpu: str | None
    cores: int = 0
    cpu_model: str = ""
    measured: DeviceFigures | None = None  # the GPU
    measured_node: NodeFigures | None = None


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speed of each rank relative to the fastest; empty if unknown, which means equal shares."""

    values: tuple[float, ...]
    source: str

    def __str__(self) -> str:
        return ",".join(f"{value:.3g}" for value in self.values)


def estimate(devices: Sequence[Device]) -> Speeds:
    gpus = [device.gpu for device in devices if device.gpu is not None]
    if not gpus:
        return _measured(common_cpu_rates([device.measured_node for device in devices])) or _of_cores(devices)
    if len(gpus) < len(devices):
        return Speeds((), "equal: some ranks have a GPU and some do not")
    if (measured := _measured(common_rates([device.measured for device in devices]))) is not None:
        return measured
    figures = [_tflops(name) for name in gpus]
    if unknown := sorted({name for name, figure in zip(gpus, figures, strict=True) if figure is None}):
        return Speeds((), f"equal: no figures for {', '.join(unknown)}")
    return _relative([figure or 0.0 for figure in figures], "vendor figures for the GPU models")


def _measured(found: tuple[list[float], str] | None) -> Speeds | None:
    return None if found is None else _relative(found[0], f"measured by ugro node bench ({found[1]})")


def _of_cores(devices: Sequence[Device]) -> Speeds:
    if any(device.cores < 1 for device in devices):
        return Speeds((), "equal: the number of cores is not known on every node")
    clocks = [_CLOCK.search(device.cpu_model) for device in devices]
    if not all(clocks):
        return _relative([float(device.cores) for device in devices], "number of cores")
    ghz = [float(clock[1]) for clock in clocks if clock]
    return _relative([device.cores * one for device, one in zip(devices, ghz, strict=True)], "cores times clock")


def _relative(figures: Sequence[float], source: str) -> Speeds:
    most = max(figures)
    return Speeds(tuple(figure / most for figure in figures), source)


def _tflops(name: str) -> float | None:
    words = re.findall(r"[a-z0-9]+", name.lower())
    if "max" in words:  # Max-Q, an older kind of laptop GPU
        return None
    figures = _LAPTOP_TFLOPS if "laptop" in words else _TFLOPS
    spans = ("".join(words[begin:end]) for begin in range(len(words)) for end in range(begin + 1, len(words) + 1))
    # The longest match: "rtx4070ti" contains "rtx4070".
    found = max((span for span in spans if span in figures), key=len, default=None)
    return None if found is None else figures[found]


# --- budget -----------------------------------------------------------------------------------------------------------
# How the time of a measurement is divided: what each phase aims at, and when it is cut off.


STORAGE_BYTES = {Mode.QUICK: 64 << 20, Mode.FULL: 1 << 30}
SIZES_BYTES = (10**6, 16 * 10**6, 128 * 10**6)  # of the all-reduces
OF_MACHINE = (Part.CPU, Part.MEMORY, Part.STORAGE)

# Together 13.5 s; asking nodes and storing figures takes some time, too. PyTorch takes seconds to load: twice.
_QUICK_S = {"machine": 3.0, "devices": 4.5, "network": 2.0, "allreduce": 4.0}
_OVERHEAD_S = 1.5
_TIMES = {Mode.QUICK: 1.0, Mode.FULL: 8.0}
_ON_SINGLE_NODES = ("machine", "devices")


def phases(parts: Collection[Part], nodes: int) -> list[str]:
    """In the order in which they run."""
    wanted = {"machine"} if any(part in parts for part in OF_MACHINE) else set()
    wanted |= {"devices"} if Part.DEVICES in parts else set()
    if nodes > 1:
        wanted |= {"network"} if Part.NETWORK in parts else set()
        wanted |= {"allreduce"} if Part.ALLREDUCE in parts else set()
    return [phase for phase in _QUICK_S if phase in wanted]


@dataclass(slots=True)
class Budget:
    """``turns``: how often the phases on single nodes run one after another, because nodes share a machine."""

    mode: Mode
    phases: list[str]
    turns: int = 1
    spent_s: float = field(default=0.0, init=False)

    @property
    def bound_s(self) -> float:
        """When all is over at the latest: 15 s or two minutes, and more only where nodes share a machine."""
        whole = sum(_QUICK_S.values()) + _OVERHEAD_S
        again = sum(_QUICK_S[phase] for phase in self.phases if phase in _ON_SINGLE_NODES)
        return (whole + again * (self.turns - 1)) * _TIMES[self.mode]

    def aim_s(self, phase: str) -> float:
        """How long one turn of this phase should take."""
        return _QUICK_S[phase] * _TIMES[self.mode]

    def limit_s(self, phase: str, turn: int = 0) -> float:
        """When it is cut off: what is left but for the turns and phases after it."""
        turns = self.turns if phase in _ON_SINGLE_NODES else 1
        later = self.aim_s(phase) * (turns - turn - 1)
        for one in self.phases[self.phases.index(phase) + 1 :]:
            later += self.aim_s(one) * (self.turns if one in _ON_SINGLE_NODES else 1)
        return max(0.0, self.bound_s - self.spent_s - later)


# --- busy -------------------------------------------------------------------------------------------------------------
# Whether a node is in use, so that its figures would be wrong and its users disturbed.


_CPU_USE = 0.5
_GPU_USE = 0.1
_GPU_MEMORY = 0.1


def busy(facts: Facts, owner: OwnerReport | None = None, *, has_jobs: bool) -> str | None:
    """Why it should not be measured now."""
    return next(_reasons(facts, owner, has_jobs), None)


def _reasons(facts: Facts, owner: OwnerReport | None, has_jobs: bool) -> Iterator[str]:
    if has_jobs:
        yield "runs a job"
    if owner is not None and owner.is_there:
        yield f"is used by its owner ({owner.sign})"
    for gpu in facts.gpus:
        if (use := gpu_use(gpu)) is not None:
            yield f"has a busy GPU {gpu.index}: {use}"
    if facts.cpu_use_ratio is not None and facts.cpu_use_ratio > _CPU_USE:
        yield f"has a busy CPU: {facts.cpu_use_ratio * 100:.0f} % in use"


def gpu_use(gpu: Gpu) -> str | None:
    """What uses it now, in words; None: nothing that matters."""
    if gpu.holder is not None:
        return f"used by {gpu.holder}"
    if gpu.use_ratio is not None and gpu.use_ratio > _GPU_USE:
        return f"{gpu.use_ratio * 100:.0f} % in use"
    # A desktop's own programs take a little.
    if gpu.memory_ratio is not None and gpu.memory_ratio > _GPU_MEMORY:
        return f"{gpu.memory_ratio * 100:.0f} % of its memory is taken"
    return None


# --- decline ----------------------------------------------------------------------------------------------------------


CHECK = "measured"
_LOW_RUNS = 2
_EARLIER = 10  # runs at most
# How far below the earlier figures: dedicated devices repeat well; a CPU shares its machine, a disk has caches.
_MARGINS = {"gpu": 0.2, "cpu": 0.4, "memory": 0.4, "storage": 0.5}
# An fsync waits for whatever else the disk does: it counts if it takes four times as long as before, and long at all.
_SYNC_MARGIN = 0.75
_LONG_SYNC_S = 0.02
_SHORTEST_SYNC_S = 1e-6  # what is said to take less has no meaning


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one device in all runs that have it, the newest first."""

    what: str  # "GPU 0 bf16"
    kind: str  # selects the margin
    unit: str  # "B/s", "TFLOP/s", "TOP/s" or "/s"
    values: tuple[float, ...]
    device: str | None = None  # the uuid

    def shown(self, value: float) -> str:
        if self.unit == "B/s":
            return f"{format_size(value)}/s"
        if self.unit == "/s":
            return f"{value:,.0f}/s" if value >= 10 else f"{value:.2g}/s"
        return f"{value:.3g} {self.unit}" if value >= 1 else f"{value * 1000:.3g} G{self.unit[1:]}"

    @property
    def key(self) -> str:
        """By the device itself: another one may get its number."""
        return f"{self.what} of {self.device}" if self.kind == "gpu" else self.what

    def least(self, before: float) -> float:
        """Below it, the figure is worse than it was ``before``."""
        if self.what == _SYNCS:
            return min(before * (1 - _SYNC_MARGIN), 1 / _LONG_SYNC_S)
        return before * (1 - _MARGINS[self.kind])


@dataclass(frozen=True, slots=True)
class Decline:
    series: Series
    now: float  # the better of the two low runs
    before: float

    @property
    def ratio(self) -> float:
        return self.now / self.before


def judge_figures(history: Sequence[NodeFigures]) -> list[Finding]:
    """``history``: one node's, the newest first."""
    runs = [run for run in history if not run.is_forced]
    found: dict[str, list[Decline]] = {}
    for series in all_series(runs):
        if (decline := declined(series)) is not None:
            found.setdefault(series.device or series.kind, []).append(decline)
    return [_finding(runs[0], declines) for declines in found.values()]


def declined(series: Series) -> Decline | None:
    low, earlier = series.values[:_LOW_RUNS], series.values[_LOW_RUNS : _LOW_RUNS + _EARLIER]
    if len(low) < _LOW_RUNS or not earlier:
        return None
    before, now = median(earlier), max(low)
    return Decline(series, now, before) if now < series.least(before) else None


def all_series(runs: Sequence[NodeFigures]) -> Iterator[Series]:
    for uuid in dict.fromkeys(device.uuid for run in runs for device in run.devices):
        yield from _of_device(uuid, [device for run in runs if (device := run.device(uuid)) is not None])
    for name, kind, read in _FIGURES:
        values = tuple(value for run in runs if (value := read(run)) is not None)
        if values:
            yield Series(name, kind, "/s" if name in (_RANDOM, _SYNCS) else "B/s", values)


def _of_device(uuid: str, runs: Sequence[DeviceFigures]) -> Iterator[Series]:
    kind = "gpu" if runs[0].is_gpu else "cpu"
    name = f"GPU {runs[0].index}" if runs[0].is_gpu else "CPU"
    figures: list[tuple[str, str, Callable[[DeviceFigures], float | None]]] = [
        *((p, "TOP/s" if p == "int8" else "TFLOP/s", lambda one, p=p: one.rate(p)) for p in PRECISIONS),
        ("memory", "B/s", lambda one: one.memory_bytes_per_s),
        ("copies to it", "B/s", lambda one: one.to_device_bytes_per_s),
        ("copies from it", "B/s", lambda one: one.from_device_bytes_per_s),
    ]
    for what, unit, read in figures:
        values = tuple(value for run in runs if (value := read(run)) is not None)
        if values:
            yield Series(f"{name} {what}", kind, unit, values, uuid)


_RANDOM = "random reads"
_SYNCS = "small fsyncs"  # one after another: so that more is better, as in all other figures
_FIGURES: tuple[tuple[str, str, Callable[[NodeFigures], float | None]], ...] = (
    ("CPU, one core", "cpu", lambda run: run.cpu.one_core_bytes_per_s if run.cpu else None),
    ("CPU, all cores", "cpu", lambda run: run.cpu.all_cores_bytes_per_s if run.cpu else None),
    ("memory", "memory", lambda run: run.memory_bytes_per_s),
    ("storage writes", "storage", lambda run: run.storage.write_bytes_per_s if run.storage else None),
    ("storage reads", "storage", lambda run: _uncached(run, lambda one: one.read_bytes_per_s)),
    (_RANDOM, "storage", lambda run: _uncached(run, lambda one: one.random_reads_per_s)),
    (_SYNCS, "storage", lambda run: _syncs_per_s(run.storage.fsync_s if run.storage else None)),
)


def _uncached(run: NodeFigures, read: Callable[..., float | None]) -> float | None:
    """Reads from a cache say nothing of the disk."""
    return None if run.storage is None or run.storage.is_cached else read(run.storage)


def _syncs_per_s(one_s: float | None) -> float | None:
    return None if one_s is None else 1 / max(one_s, _SHORTEST_SYNC_S)


def _finding(newest: NodeFigures, declines: Sequence[Decline]) -> Finding:
    worst = min(declines, key=lambda one: one.ratio)
    more = f" ({len(declines) - 1} more figures are low, too)" if len(declines) > 1 else ""
    text = (
        f"{worst.series.what}: {worst.series.shown(worst.now)} in the last two measurements, "
        f"{worst.series.shown(worst.before)} before{more}"
    )
    device = newest.device(worst.series.device) if worst.series.device else None
    return Finding(newest.node, CHECK, Grade.WARNING, text, _remedy(worst.series.kind, device))


def _remedy(kind: str, device: DeviceFigures | None) -> str:
    if device is not None and device.is_gpu:
        seen = device.seen
        if seen.pcie_width and seen.pcie_width_max and seen.pcie_width < seen.pcie_width_max:
            return (
                f"its PCIe link has {seen.pcie_width} of {seen.pcie_width_max} lanes: reseat the card or try "
                "another slot"
            )
        if reasons := [word for word in seen.throttle if word != "power"]:
            hot = f" at {seen.temperature_c:.0f} °C" if seen.temperature_c is not None else ""
            return f"it was slowed down by {', '.join(reasons)}{hot}: check fans, dust and power"
        return "look for throttling and errors: nvidia-smi -q -d PERFORMANCE,ECC; a newer driver may be slower, too"
    if kind == "storage":
        return "the disk may be dying or almost full: smartctl -a; then measure again: ugro node bench --only storage"
    return "another program, a power profile or heat may slow the machine: see ugro top; then measure again"


# --- rounds -----------------------------------------------------------------------------------------------------------
# Who is measured when: no node takes part in two measurements at once.


Pair = tuple[str, str]


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Every pair once, each node at most once in a round: the rounds of a tournament."""
    places: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        # The first one stays, the others move on by one place.
        places = [places[0], places[-1], *places[1:-1]]
    return [one for one in found if one]


def waves(machines: Mapping[str, str]) -> list[list[str]]:
    """``machines``: by node, the machine that it is on. Of nodes on one machine, one is measured at a time."""
    found: list[list[str]] = []
    taken: dict[str, int] = {}
    for node, machine in machines.items():
        turn = taken.get(machine, 0)
        taken[machine] = turn + 1
        if turn == len(found):
            found.append([])
        found[turn].append(node)
    return found
