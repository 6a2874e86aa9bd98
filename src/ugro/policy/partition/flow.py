"""How long a step of a pipeline takes: its forwards and backwards, each as soon as its input is there.

The order in which a device takes its micro-batches is that of torch's schedules, 1F1B and interleaved 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ugro.policy.partition.problem import Costs, Problem, Stage


@dataclass(frozen=True, slots=True)
class Work:
    stage: int
    micro_batch: int
    is_forward: bool


def step_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """Without optimizer and data."""
    costs = Costs(problem)
    positions = {device: at for at, device in enumerate(dict.fromkeys(stage.device for stage in stages))}
    queues = {device: work_of(position, problem, len(positions)) for device, position in positions.items()}
    done_s: dict[Work, float] = {}
    free_s = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        is_stuck = True
        for device, queue in queues.items():
            while queue and (ready := _ready_s(costs, stages, queue[0], done_s)) is not None:
                work = queue.pop(0)
                stage = stages[work.stage]
                taken = costs.forward_s(stage) if work.is_forward else costs.backward_s(stage)
                free_s[device] = done_s[work] = max(ready, free_s[device]) + taken
                is_stuck = False
        assert not is_stuck, "an order of work that waits for itself"
    return max(free_s.values())


def work_of(position: int, problem: Problem, devices: int) -> list[Work]:
    """What the device at this position of the pipeline does, in order."""
    micro_batches, each = problem.micro_batches, problem.stages_each
    in_round = micro_batches if each == 1 else micro_batches // max(1, micro_batches // devices)
    if each == 1:
        warm_up = min(micro_batches, devices - position)
    else:
        warm_up = min((each - 1) * in_round + 2 * (devices - 1 - position), micro_batches * each)
    forwards = [
        Work(number // in_round % each * devices + position, _turn(number, in_round, each), True)
        for number in range(micro_batches * each)
    ]
    backwards = [
        Work((each - 1 - number // in_round % each) * devices + position, _turn(number, in_round, each), False)
        for number in range(micro_batches * each)
    ]
    return _mixed(forwards, backwards, warm_up, is_backward_first=each == 1)


def _turn(number: int, in_round: int, each: int) -> int:
    """Which micro-batch a device takes with its n-th work of a kind: a round of them for each of its stages."""
    return number // (in_round * each) * in_round + number % in_round


def _mixed(forwards: list[Work], backwards: list[Work], warm_up: int, *, is_backward_first: bool) -> list[Work]:
    mixed = forwards[:warm_up]
    rest = forwards[warm_up:]
    for backward in backwards:
        pair = [backward, *rest[:1]]
        mixed += pair if is_backward_first else pair[::-1]
        del rest[:1]
    return mixed


def _ready_s(costs: Costs, stages: Sequence[Stage], work: Work, done_s: dict[Work, float]) -> float | None:
    """When its input is there; None if that is not known yet."""
    if work.is_forward:
        return _arrived_s(costs, stages, Work(work.stage - 1, work.micro_batch, True), work.stage, done_s)
    if work.stage == len(stages) - 1:
        return done_s.get(Work(work.stage, work.micro_batch, True))
    own = done_s.get(Work(work.stage, work.micro_batch, True))
    if own is None:
        return None
    return _arrived_s(costs, stages, Work(work.stage + 1, work.micro_batch, False), work.stage, done_s)


def _arrived_s(costs: Costs, stages: Sequence[Stage], needed: Work, at: int, done_s: dict[Work, float]) -> float | None:
    if needed.stage < 0:
        return 0.0
    done = done_s.get(needed)
    if done is None:
        return None
    later = max(needed.stage, at)
    return done + costs.transfer_s(stages[later - 1].device, stages[later]) / 2
