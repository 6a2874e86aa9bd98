"""What is cut, for which devices: costs of layers, memory, links; and what a partition of it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer takes on any device. The parts before and after the layers count as layers, too."""

    weight_bytes: int = 0  # parameters, gradients, and the optimizer's state
    saved_bytes: int = 0  # of one micro-batch, from its forward until its backward
    sent_bytes: int = 0  # of one micro-batch, to the next layer


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds for one micro-batch, by layer."""

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory_bytes: int | None = None  # None: no limit is known

    def slowed(self, times: float) -> Device:
        """The same device when all that it does takes ``times`` as long."""
        forward, backward = ([one * times for one in part] for part in (self.forward_s, self.backward_s))
        return replace(self, forward_s=tuple(forward), backward_s=tuple(backward))


@dataclass(frozen=True, slots=True)
class Link:
    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def seconds(self, sent_bytes: int) -> float:
        return self.latency_s + sent_bytes * self.s_per_byte


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers ``begin`` to ``end``, without the latter, on one device."""

    device: int
    begin: int
    end: int

    @property
    def layers(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Partition:
    stages: tuple[Stage, ...]  # in the order of the layers
    predicted_s: float = 0.0  # for a step without optimizer and data
    reason: str = ""

    @property
    def order(self) -> tuple[int, ...]:
        """The devices, each once, in the order of their first stages."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    def layers_of(self, device: int) -> list[int]:
        return [at for stage in self.stages if stage.device == device for at in range(stage.begin, stage.end)]


@dataclass(frozen=True, slots=True)
class Problem:
    layers: tuple[Layer, ...]
    devices: tuple[Device, ...]
    links: tuple[tuple[Link, ...], ...]  # from each device to each
    micro_batches: int
    stages_each: int = 1  # of every device; more than one: they are interleaved
    may_reorder: bool = True  # else the first device has the first stage, and so on

    def link(self, one: int, other: int) -> Link:
        return self.links[one][other]


class Costs:
    """Sums over neighbouring layers, by device."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._forward = [_sums(device.forward_s) for device in problem.devices]
        self._backward = [_sums(device.backward_s) for device in problem.devices]
        self._weights = _sums([layer.weight_bytes for layer in problem.layers])
        self._saved = _sums([layer.saved_bytes for layer in problem.layers])

    def forward_s(self, stage: Stage) -> float:
        sums = self._forward[stage.device]
        return sums[stage.end] - sums[stage.begin]

    def backward_s(self, stage: Stage) -> float:
        sums = self._backward[stage.device]
        return sums[stage.end] - sums[stage.begin]

    def compute_s(self, stage: Stage) -> float:
        return self.forward_s(stage) + self.backward_s(stage)

    def transfer_s(self, before: int, stage: Stage) -> float:
        """There and back: activations from the device ``before``, gradients to it."""
        if before == stage.device:
            return 0.0
        return 2 * self.problem.link(before, stage.device).seconds(self.problem.layers[stage.begin - 1].sent_bytes)

    def memory_bytes(self, stage: Stage, in_flight: int) -> int:
        """Weights, what ``in_flight`` micro-batches keep, and what torch receives each micro-batch into."""
        layers = self.problem.layers
        received = layers[stage.begin - 1].sent_bytes if stage.begin else 0
        returned = layers[stage.end - 1].sent_bytes if stage.end < len(layers) else 0
        weights = self._weights[stage.end] - self._weights[stage.begin]
        saved = self._saved[stage.end] - self._saved[stage.begin]
        return int(weights + in_flight * saved + self.problem.micro_batches * (received + returned))


def _sums(values: Sequence[float]) -> list[float]:
    return [0, *accumulate(values)]
