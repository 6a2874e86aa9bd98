"""Cuts the layers into one stage for each device, in the best order of the devices. Exact.

What is minimised is a step of a pipeline that never stalls: the first micro-batch passes all stages, and the slowest
stage then takes its time for each of the others. A partial partition is dropped only if another one of the same devices
and layers is no worse both in its slowest stage and in the sum of its stages. Every rank computes this from the same
numbers and must get the same result, so it only compares, adds and multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from ugro.policy.partition.problem import Costs, Problem, Stage

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
