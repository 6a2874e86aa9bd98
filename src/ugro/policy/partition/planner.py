"""Decides how the layers of a model are spread over the devices of a pipeline, and when to spread them again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ugro.core.errors import Unsatisfiable
from ugro.core.support.quantity import format_duration, format_size
from ugro.policy.partition import interleave
from ugro.policy.partition.flow import step_s
from ugro.policy.partition.problem import Costs, Partition, Problem, Stage
from ugro.policy.partition.search import cut, in_flight

_MIN_GAIN = 0.05  # of a step: layers are not moved for less
_WORTH_MOVING = 5  # times the cost of moving must be saved in the steps that are left
_CHANGED = 1.15  # a device that takes so many times as long as was measured is named


def plan(problem: Problem) -> Partition:
    """The best partition, with its reason. Raises if there is none."""
    _check(problem)
    stages = cut(replace(problem, stages_each=1))
    if stages is not None and problem.stages_each > 1:
        stages = interleave.interleaved(problem, stages)
    if stages is None:
        raise _too_large(problem)
    return described(problem, stages)


def equal(problem: Problem, before: int = 0, after: int = 0) -> Partition:
    """As many layers for each device, in the given order, as without any measurements.

    ``before`` and ``after``: how many of the first and last ones are not layers, and come with their neighbour.
    """
    _check(problem)
    count, layers = len(problem.devices) * problem.stages_each, len(problem.layers) - before - after
    ends = [before + layers * (at + 1) // count for at in range(count)]
    ends[-1] += after
    devices = [at % len(problem.devices) for at in range(count)]
    stages = tuple(map(Stage, devices, [0, *ends[:-1]], ends))
    return replace(described(problem, stages), reason="equal numbers of layers")


def described(problem: Problem, stages: Sequence[Stage]) -> Partition:
    predicted_s = step_s(problem, stages)
    costs = Costs(problem)
    busy = {stage.device: 0.0 for stage in stages}
    for stage in stages:
        busy[stage.device] += problem.micro_batches * costs.compute_s(stage)
    slowest = max(busy, key=lambda device: busy[device])
    part = busy[slowest] / max(1e-12, predicted_s)
    reason = f"{problem.devices[slowest].name} computes longest, {100 * part:.0f} % of {format_duration(predicted_s)}"
    return Partition(tuple(stages), predicted_s, reason)


def _check(problem: Problem) -> None:
    devices, wanted = len(problem.devices), len(problem.devices) * problem.stages_each
    if len(problem.layers) < wanted:
        raise Unsatisfiable(
            f"{len(problem.layers)} layers cannot be cut into {wanted} stages for {devices} ranks",
            hint="launch it on fewer nodes",
        )


def _too_large(problem: Problem) -> Unsatisfiable:
    costs = Costs(problem)
    everything = Stage(0, 0, len(problem.layers))
    needed = costs.memory_bytes(everything, in_flight(problem, 0))
    limits = [f"{one.name} {format_size(one.memory_bytes)}" for one in problem.devices if one.memory_bytes is not None]
    return Unsatisfiable(
        f"the model fits into these devices in no partition: it takes about {format_size(needed)}; "
        f"there are {', '.join(limits)}",
        hint="more micro-batches (micro_batches=…) take less memory for activations; or add a node",
    )


# --- again ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """What moving layers would cost, and how long it would help."""

    s_per_byte: float
    steps_left: int | None  # None: not known

    def seconds(self, problem: Problem, old: Partition, new: Partition) -> float:
        """Each layer travels once, and the devices send at the same time."""
        moved = moved_layers(old, new)
        return self.s_per_byte * math.fsum(problem.layers[layer].weight_bytes for layer in moved)


@dataclass(frozen=True, slots=True)
class Review:
    problem: Problem  # with what the devices take now
    partition: Partition
    is_moved: bool


def review(problem: Problem, partition: Partition, busy_s: Sequence[float], move: Move) -> Review:
    """Another partition if devices have changed so much that moving layers pays.

    ``busy_s``: how long each device computed in a step. The parts of its layers are as they were measured.
    """
    costs = Costs(problem)
    times = []
    for device, busy in enumerate(busy_s):
        stages = [stage for stage in partition.stages if stage.device == device]
        expected = problem.micro_batches * math.fsum(costs.compute_s(stage) for stage in stages)
        times.append(busy / expected if expected > 0 and busy > 0 else 1.0)
    devices = tuple(device.slowed(by) for device, by in zip(problem.devices, times, strict=True))
    now = replace(problem, devices=devices)
    kept = described(now, partition.stages)
    try:
        best = plan(now)
    except Unsatisfiable:  # memory was enough before, and layers take no more of it now
        return Review(now, kept, is_moved=False)
    saved_s = kept.predicted_s - best.predicted_s
    steps = move.steps_left
    is_short = steps is not None and saved_s * steps <= _WORTH_MOVING * move.seconds(problem, partition, best)
    if saved_s < _MIN_GAIN * kept.predicted_s or is_short:
        return Review(now, kept, is_moved=False)
    gain = f"a step should take {format_duration(best.predicted_s)} instead of {format_duration(kept.predicted_s)}"
    return Review(now, replace(best, reason=f"{_changes(problem, times)}: {gain}"), is_moved=True)


def moved_layers(old: Partition, new: Partition) -> list[int]:
    """The layers that change their device."""
    return [layer for layer, device in enumerate(owners(new)) if owners(old)[layer] != device]


def owners(partition: Partition) -> list[int]:
    """The device of each layer."""
    return [stage.device for stage in partition.stages for _ in range(stage.layers)]


def _changes(problem: Problem, times: Sequence[float]) -> str:
    found = []
    for device, by in zip(problem.devices, times, strict=True):
        if by >= _CHANGED:
            found.append(f"{device.name} takes {by:.2f} times as long as before")
        elif by <= 1 / _CHANGED:
            found.append(f"{device.name} is {1 / by:.2f} times as fast as before")
    return ", ".join(found) or "devices take other times than were measured"
