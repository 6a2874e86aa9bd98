"""Estimates how fast a job's devices are: ``balance: static`` takes its shares from here.

By what ``ugro node bench`` measured, if all of them were; else by their model names, with figures of the vendors. A
training may see other ratios, which ``adaptive`` then finds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ugro.core.figures import DeviceFigures, NodeFigures
from ugro.policy.hardware.speed import common_cpu_rates, common_rates

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
