"""Cuts the layers into several stages for each device, which take turns. Good, not exact: boundaries are moved while
that makes a step shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ugro.policy.partition.flow import step_s
from ugro.policy.partition.problem import Costs, Problem, Stage

_MOST_ROUNDS = 100


def interleaved(problem: Problem, alone: Sequence[Stage]) -> tuple[Stage, ...] | None:
    """From the best stages with one for each device; None if what is found does not fit into the memory."""
    order = [stage.device for stage in alone] * problem.stages_each
    ends = _first_ends(problem, alone)
    best_s = _seconds(problem, order, ends)
    for _ in range(_MOST_ROUNDS):
        found = min(((_seconds(problem, order, tried), tried) for tried in _moved(ends)), default=(best_s, ends))
        if found[0] >= best_s:
            break
        best_s, ends = found
    return None if best_s == float("inf") else _stages(order, ends)


def fits(problem: Problem, stages: Sequence[Stage]) -> bool:
    """The stages of a device share its memory. Interleaved stages hold more micro-batches than 1F1B alone."""
    costs = Costs(problem)
    devices = len(problem.devices)
    for position, device in enumerate(dict.fromkeys(stage.device for stage in stages)):
        limit = problem.devices[device].memory_bytes
        held = min(problem.micro_batches, devices + 2 * (devices - 1 - position))
        needed = sum(costs.memory_bytes(stage, held) for stage in stages if stage.device == device)
        if limit is not None and needed > limit:
            return False
    return True


def _first_ends(problem: Problem, alone: Sequence[Stage]) -> list[int]:
    """Each turn takes the same part of every device's layers, and at least one."""
    layers, count = len(problem.layers), len(alone) * problem.stages_each
    wanted = [stage.layers / problem.stages_each for _ in range(problem.stages_each) for stage in alone]
    ends: list[int] = []
    reached = 0.0
    for at, part in enumerate(wanted):
        reached += part
        least = (ends[-1] if ends else 0) + 1
        ends.append(min(max(round(reached), least), layers - (count - at - 1)))
    return [*ends[:-1], layers]


def _moved(ends: list[int]) -> Iterator[list[int]]:
    """Every way to move one boundary, or neighbouring ones together, by a layer."""
    for first in range(len(ends) - 1):
        for last in range(first, len(ends) - 1):
            for step in (-1, 1):
                tried = [end + step if first <= at <= last else end for at, end in enumerate(ends)]
                if all(before < after for before, after in zip([0, *tried], tried, strict=False)):
                    yield tried


def _stages(order: Sequence[int], ends: Sequence[int]) -> tuple[Stage, ...]:
    return tuple(map(Stage, order, [0, *ends[:-1]], ends))


def _seconds(problem: Problem, order: Sequence[int], ends: Sequence[int]) -> float:
    stages = _stages(order, ends)
    return step_s(problem, stages) if fits(problem, stages) else float("inf")
