"""What is cut, for which devices: costs of layers, memory, links; and what a partition of it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


# --- flow -------------------------------------------------------------------------------------------------------------
# How long a step of a pipeline takes: its forwards and backwards, each as soon as its input is there.
#
# The order in which a device takes its micro-batches is that of torch's schedules, 1F1B and interleaved 1F1B.


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


# --- interleave -------------------------------------------------------------------------------------------------------
# Cuts the layers into several stages for each device, which take turns. Good, not exact: boundaries are moved while
# that makes a step shorter.


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


# --- micro batches ----------------------------------------------------------------------------------------------------
# How a batch is cut into micro-batches. Those of one round are equally large: torch's schedules need that.


_EACH = 4  # micro-batches for every rank: a bubble of at most a quarter


def chosen(total: int, ranks: int, stages_each: int = 1) -> int:
    """Near to four for each rank, and such that all are equally large if that is possible."""
    wanted = _EACH * ranks
    dividing = [
        count
        for count in range(ranks, min(total, 2 * wanted) + 1)
        if total % count == 0 and (stages_each == 1 or is_whole(count, ranks))
    ]
    return min(dividing, key=lambda count: (abs(count - wanted), count), default=max(1, min(total, wanted)))


def rounds(total: int, micro_batches: int) -> list[tuple[int, int]]:
    """How many micro-batches of which size; what is left over comes in a smaller one of its own."""
    size = -(-total // max(1, min(total, micro_batches)))
    count, rest = divmod(total, size)
    return [(count, size), *([(1, rest)] if rest else [])]


def is_whole(count: int, ranks: int) -> bool:
    """Torch's interleaved schedule takes rounds of as many micro-batches as there are ranks, or a little more."""
    return count % max(1, count // ranks) == 0
