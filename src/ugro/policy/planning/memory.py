"""What each device needs if a model is spread in one way or another, and which of these ways fit. Pure.

Parameters, gradients and moments are counted exactly; what layers keep of a sample was measured. Each way is counted
with equal shares. Where a device computes its share in parts, one sample at a time is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ugro.core.planning import DeviceNeed, ModelSize
from ugro.core.support.quantity import format_size
from ugro.policy.recipes.fit import Device
from ugro.policy.recipes.memory import AROUND_CPU, AROUND_GPU
from ugro.policy.wording import in_words

DDP, FSDP, TENSOR, PIPELINE = "ddp", "fsdp", "tp+dp", "pipeline"
_GATHERED = 2  # blocks at once: the one that computes, and the next


@dataclass(frozen=True, slots=True)
class _Part:
    """What one device has of a model, and of a sample's activations."""

    parameters: float
    gradients: float
    optimizer: float
    samples: int
    sample: float


def needs(size: ModelSize, batch: int, devices: Sequence[Device], *, can_accumulate: bool) -> list[DeviceNeed]:
    """Of each device in each way that is possible with these devices."""
    ways: list[tuple[str, Callable[[Device], _Part]]] = [(DDP, lambda device: _ddp(size, batch, devices))]
    if len(devices) > 1:
        ways.append((FSDP, lambda device: _fsdp(size, batch, devices)))
        per_node = _per_node(devices)
        if size.block and per_node is not None and per_node > 1:
            ways.append((TENSOR, lambda device: _tensor(size, batch, devices, per_node)))
        if size.block:
            ways.append((PIPELINE, lambda device: _pipeline(size, batch, devices, device)))
    return [
        _need(way, device, part(device), can_accumulate=can_accumulate) for way, part in ways for device in devices
    ]


def _need(way: str, device: Device, part: _Part, *, can_accumulate: bool) -> DeviceNeed:
    around = AROUND_CPU if device.is_cpu else AROUND_GPU
    state = round(part.parameters) + round(part.gradients) + round(part.optimizer) + around
    free = device.room_bytes - state
    at_once = part.samples if not part.sample else min(part.samples, int(free // part.sample))
    if free < 0 or (at_once < part.samples and not can_accumulate and way != PIPELINE):
        at_once = 0
    return DeviceNeed(
        way, device.node, device.name, round(part.parameters), round(part.gradients), round(part.optimizer),
        round(part.samples * part.sample), around, device.room_bytes, part.samples, max(0, at_once),
    )  # fmt: skip


# --- the ways -------------------------------------------------------------------------------------------------------


def _ddp(size: ModelSize, batch: int, devices: Sequence[Device]) -> _Part:
    return _Part(size.parameters, size.gradients, size.optimizer, _share(batch, len(devices)), size.sample)


def _fsdp(size: ModelSize, batch: int, devices: Sequence[Device]) -> _Part:
    """A part of everything; what is in no block is gathered for the whole step, blocks one after the other."""
    count = len(devices)
    gathered = size.rest + _GATHERED * size.block if size.block else size.parameters
    trained = size.gradients / max(1, size.parameters)
    exchanged = (size.block or size.parameters) * trained  # gradients of a block before they are shared
    return _Part(
        size.parameters / count + gathered, size.gradients / count + exchanged, size.optimizer / count,
        _share(batch, count), size.sample,
    )  # fmt: skip


def _tensor(size: ModelSize, batch: int, devices: Sequence[Device], per_node: int) -> _Part:
    """Blocks are split among the devices of a node. Across nodes all is shared, and gathered for the whole step."""
    units = len(devices) // per_node
    own = (size.parameters - size.rest) / per_node + size.rest
    share = own / max(1, size.parameters)
    trained = size.gradients / max(1, size.parameters)
    return _Part(
        own + own / units, size.gradients * share / units + size.block / per_node * trained,
        size.optimizer * share / units, _share(batch, units), size.sample,
    )  # fmt: skip


def _pipeline(size: ModelSize, batch: int, devices: Sequence[Device], device: Device) -> _Part:
    """Layers in proportion to the room; at most as many micro-batches are on the way as there are devices."""
    part = device.room_bytes / max(1, sum(one.room_bytes for one in devices))
    return _Part(size.parameters * part, size.gradients * part, size.optimizer * part, batch, size.sample * part)


def _share(batch: int, count: int) -> int:
    return -(-batch // count)


def _per_node(devices: Sequence[Device]) -> int | None:
    """How many devices each node has; None if not all have the same number."""
    counts = {one.node: sum(other.node == one.node for other in devices) for one in devices}
    return next(iter(counts.values())) if len(set(counts.values())) == 1 else None


# --- words ----------------------------------------------------------------------------------------------------------


def that_fit(found: Sequence[DeviceNeed]) -> list[str]:
    return [
        way
        for way in dict.fromkeys(one.way for one in found)
        if all(one.at_once for one in found if one.way == way)
    ]


def too_large(size: ModelSize, devices: Sequence[Device]) -> str:
    """Of a training that ran out of memory: in which ways its model, optimizer and one sample could fit."""
    found = needs(size, len(devices), devices, can_accumulate=True)
    state = format_size(size.parameters + size.gradients + size.optimizer)
    words = f"parameters, gradients and optimizer need {state} on each device"
    others = [way for way in that_fit(found) if way != DDP]
    if not others:
        return words
    return f"{words}; spread over {len(devices)} devices they fit: parallel={in_words(list(map(repr, others)), 'or')}"
