"""Cuts the layers into one stage for each device, in the best order of the devices. Exact.

What is minimised is a step of a pipeline that never stalls: the first micro-batch passes all stages, and the slowest
stage then takes its time for each of the others. A partial partition is dropped only if another one of the same devices
and layers is no worse both in its slowest stage and in the sum of its stages. Every rank computes this from the same
numbers and must get the same result, so it only compares, adds and multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ugro.kernel.support.errors import Unsatisfiable
from ugro.kernel.support.quantities import format_duration, format_size
from ugro.train.rules import partition as interleave
from ugro.train.rules.partition import Costs, Partition, Problem, Stage, step_s

_MOST_ORDERS_OF = 6  # of more devices, orders are improved by exchanging two at a time


@dataclass(frozen=True, slots=True)
class _Part:
    """Stages for the first layers."""

    worst_s: float = 0.0
    total_s: float = 0.0
    stage: Stage | None = None
    before: _Part | None = None

    def stages(self) -> list[Stage]:
        found, part = [], self
        while part.stage is not None and part.before is not None:
            found.append(part.stage)
            part = part.before
        return found[::-1]


_Fronts = dict[tuple[frozenset[int], int], dict[int, list[_Part]]]  # by devices used, the last of them, and layers


def cut(problem: Problem) -> tuple[Stage, ...] | None:
    """The best stages; None if no partition fits into the memory."""
    costs = Costs(problem)
    given = tuple(range(len(problem.devices)))
    found = _best(costs, given, math.inf)
    if not problem.may_reorder or len(given) == 1:
        return _stages(found)
    if len(given) <= _MOST_ORDERS_OF:
        limit = math.inf if found is None else seconds(problem, found.stages())
        return _stages(_best(costs, None, limit) or found)
    return _stages(_exchanged(costs, given, found))


def seconds(problem: Problem, stages: Sequence[Stage]) -> float:
    """What is minimised."""
    costs = Costs(problem)
    taken = [
        costs.compute_s(stage) + (costs.transfer_s(stages[at - 1].device, stage) if at else 0.0)
        for at, stage in enumerate(stages)
    ]
    return _value(problem, max(taken), math.fsum(taken))


def in_flight(problem: Problem, position: int) -> int:
    """How many micro-batches a stage holds at once: 1F1B starts a backward as soon as there is one."""
    return min(problem.micro_batches, len(problem.devices) - position)


def fits(costs: Costs, stage: Stage, position: int) -> bool:
    limit = costs.problem.devices[stage.device].memory_bytes
    return limit is None or costs.memory_bytes(stage, in_flight(costs.problem, position)) <= limit


def _value(problem: Problem, worst_s: float, total_s: float) -> float:
    return (problem.micro_batches - 1) * worst_s + total_s


def _stages(part: _Part | None) -> tuple[Stage, ...] | None:
    return None if part is None else tuple(part.stages())


# --- all partitions at once -------------------------------------------------------------------------------------


def _best(costs: Costs, order: Sequence[int] | None, limit_s: float) -> _Part | None:
    """The best part with all layers, in this order of devices or in any. Only one below the limit is looked for."""
    devices = len(costs.problem.devices)
    fronts: _Fronts = {(frozenset(), -1): {0: [_Part()]}}
    for position in range(devices):
        grown: _Fronts = {}
        for (used, last), by_layers in fronts.items():
            wanted = range(devices) if order is None else (order[position],)
            for device in wanted:
                if device not in used:
                    front = grown.setdefault((used | {device}, device), {})
                    _grow(costs, by_layers, (position, last, device), front, limit_s)
        fronts = grown
    whole = [part for by_layers in fronts.values() for parts in by_layers.values() for part in parts]
    return min(whole, key=lambda part: _value(costs.problem, part.worst_s, part.total_s), default=None)


def _grow(
    costs: Costs,
    by_layers: dict[int, list[_Part]],
    where: tuple[int, int, int],
    front: dict[int, list[_Part]],
    limit_s: float,
) -> None:
    """Adds one stage, of every possible length, to every part."""
    position, last, device = where
    problem = costs.problem
    for begin, parts in by_layers.items():
        for stage in _lengths(problem, begin, position, device):
            taken_s = costs.compute_s(stage) + (costs.transfer_s(last, stage) if position else 0.0)
            if _value(problem, taken_s, taken_s) >= limit_s:
                break  # longer ones take longer still
            if not fits(costs, stage, position):
                continue
            for part in parts:
                longer = _Part(max(part.worst_s, taken_s), part.total_s + taken_s, stage, part)
                if _value(problem, longer.worst_s, longer.total_s) < limit_s:
                    _add(front.setdefault(stage.end, []), longer)


def _lengths(problem: Problem, begin: int, position: int, device: int) -> Iterator[Stage]:
    """Each stage has at least one layer, and the last one all that are left."""
    left = len(problem.devices) - position - 1
    layers = len(problem.layers)
    first = begin + 1 if left else layers
    for end in range(max(first, begin + 1), layers - left + 1):
        yield Stage(device, begin, end)


def _add(front: list[_Part], part: _Part) -> None:
    if any(one.worst_s <= part.worst_s and one.total_s <= part.total_s for one in front):
        return
    front[:] = [one for one in front if one.worst_s < part.worst_s or one.total_s < part.total_s]
    front.append(part)


# --- many devices -----------------------------------------------------------------------------------------------


def _exchanged(costs: Costs, order: tuple[int, ...], found: _Part | None) -> _Part | None:
    """Each order is cut exactly; the orders are not all tried."""
    best, best_s = found, math.inf if found is None else _value(costs.problem, found.worst_s, found.total_s)
    has_improved = True
    while has_improved:
        has_improved = False
        for one, other in combinations(range(len(order)), 2):
            tried = list(order)
            tried[one], tried[other] = tried[other], tried[one]
            better = _best(costs, tried, best_s)
            if better is not None:
                order, best, has_improved = tuple(tried), better, True
                best_s = _value(costs.problem, better.worst_s, better.total_s)
    return best


# --- planner ----------------------------------------------------------------------------------------------------------
# Decides how the layers of a model are spread over the devices of a pipeline, and when to spread them again.


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
