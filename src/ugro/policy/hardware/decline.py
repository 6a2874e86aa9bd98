"""Whether a device has become worse than it was: by its own earlier figures, far outside of what noise explains.

One low run proves nothing: a neighbour on the machine, a quota, a full cache. Two in a row, both far below the median
of the runs before, do. Runs that were forced on a busy node count neither way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ugro.core.figures import PRECISIONS, DeviceFigures, NodeFigures
from ugro.core.finding import Finding, Grade
from ugro.core.support.quantity import format_size

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
