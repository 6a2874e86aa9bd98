"""How fast nodes are, relative to each other, by what was measured: chooses among nodes that are equal otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ugro.core.figures import DeviceFigures, NodeFigures

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
