"""Reads trials from the records that their ranks wrote. Records come from nodes: what is not sensible is a problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ugro.features.planning.model import DeviceNeed, JointTrial, ModelSize, NodeTrial, Pair, Point, RankTrial
from ugro.features.recipes.rules_memory import AROUND_CPU, AROUND_GPU, MOMENTS, Device
from ugro.kernel.support.quantities import format_size, in_words
from ugro.kernel.telemetry.records import ModelRecord, StepRecord, Training, TrialRecord

# --- arguments --------------------------------------------------------------------------------------------------------
# The arguments of a script that may change how fast it is, so that a trial need not be repeated for the others.


# Common options that change how long a training is, or what it is called, and not how long a step takes.
_WITHOUT_EFFECT = frozenset(
    {
        *("epochs", "num-epochs", "max-epochs", "num-train-epochs", "seed", "lr", "learning-rate", "weight-decay"),
        *("name", "run-name", "experiment", "tag", "tags", "notes", "output", "output-dir", "out", "log-dir"),
    }
)


def that_matter(arguments: Sequence[str]) -> tuple[str, ...]:
    return tuple(_that_matter(arguments))


def _that_matter(arguments: Sequence[str]) -> Iterator[str]:
    is_value = False
    for word in arguments:
        name, has_value, _ = word.partition("=")
        if name.startswith("--") and name[2:].replace("_", "-").lower() in _WITHOUT_EFFECT:
            is_value = not has_value
        elif is_value and not _is_option(word):
            is_value = False
        else:
            is_value = False
            yield word


def _is_option(word: str) -> bool:
    """A negative number is a value."""
    return word.startswith("-") and not word[1:2].isdigit()


# --- memory -----------------------------------------------------------------------------------------------------------
# What each device needs if a model is spread in one way or another, and which of these ways fit. Pure.
#
# Parameters, gradients and moments are counted exactly; what layers keep of a sample was measured. Each way is counted
# with equal shares. Where a device computes its share in parts, one sample at a time is enough.


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


# --- reading ----------------------------------------------------------------------------------------------------------


_WARM_UP_STEPS = 2  # the first allocates and compiles, the second is the first whose time is whole
_DISTURBED = 3.0  # times the usual duration: an evaluation, a loader that was made again; noise counts
_MOST_OF_MEMORY = 0.92
_LEAST_JOINT_STEPS = 3
_SETTLED = 0.1  # of the batch: shares that differ by less are nearly the last ones, and more steps are less noise
_NO_STEP = "no step was complete within the time of a trial"


@dataclass(frozen=True, slots=True)
class About:
    """What the agent knows of a trial."""

    node: str
    device: str
    at: str = ""
    job: int = 0
    ran_out_of_memory: bool = False


def node_trial(training: Training, about: About) -> NodeTrial | str:
    """A text says why nothing was measured."""
    trial = training.trial
    if (problem := _problem(training)) is not None or trial is None or training.model is None:
        return problem or "it recorded no model: the script does not use run.wrap"
    ranks = len(training.steps[-1].shares)
    steps = [step for step in training.steps if _is_whole(step, trial, ranks)]
    measured = [_rank(steps, rank, training, about.ran_out_of_memory) for rank in range(ranks)]
    if any(not one.points for one in measured):
        return _NO_STEP
    return NodeTrial(
        about.node, about.device, tuple(measured), trial.global_batch, training.model.parameters,
        training.model.gradient_bytes, _between_own(steps) if ranks > 1 else 0.0, trial.least, trial.can_accumulate,
        about.at, about.job, model_size(training.model, trial, measured[0].points), trial.is_of_local,
    )  # fmt: skip


def model_size(model: ModelRecord, trial: TrialRecord | None, points: Sequence[Point] = ()) -> ModelSize | None:
    """What is not known of the optimizer is assumed to be AdamW's. ``points``: of a rank that has the whole model."""
    if not model.parameter_bytes:
        return None  # of a model without parameters nothing can be said
    optimizer = trial.optimizer_bytes if trial is not None else 0
    sample = trial.sample_bytes if trial is not None else 0
    if len(points) == 2 and (small := points[0].memory_bytes) and (large := points[1].memory_bytes):
        sample = max(sample, (large - small) // (points[1].samples - points[0].samples))
    return ModelSize(
        model.parameter_bytes, model.gradient_bytes, optimizer or MOMENTS * model.gradient_bytes, sample,
        model.block_bytes, model.rest_bytes,
    )  # fmt: skip


def joint_trial(training: Training, about: About) -> JointTrial | str:
    if (problem := _problem(training)) is not None or training.trial is None:
        return problem or "it recorded nothing"
    trial, ranks = training.trial, len(training.trial.nodes)
    steps = [step for step in training.steps[_WARM_UP_STEPS:] if _is_whole(step, trial, ranks)]
    if not steps:
        return _NO_STEP
    last = steps[-1]
    settled = [step for step in steps if _moved(step.shares, last.shares) <= _SETTLED]
    if len(settled) < _LEAST_JOINT_STEPS:
        settled = steps[-_LEAST_JOINT_STEPS:]
    settled = _undisturbed(settled, [step.step_s for step in settled])
    pairs = [Pair(trial.nodes[one], trial.nodes[other], s) for one, other, s in trial.pairs if max(one, other) < ranks]
    return JointTrial(
        trial.nodes, tuple(fmean(step.shares[rank] for step in settled) for rank in range(ranks)),
        tuple(fmean(step.own_s[rank] for step in settled) for rank in range(ranks)),
        fmean(min(step.communication_s) for step in settled), fmean(step.step_s for step in settled),
        trial.exchange_s, tuple(pairs), about.at, about.job,
    )  # fmt: skip


def _moved(shares: Sequence[int], last: Sequence[int]) -> float:
    """The part of the batch that other ranks have."""
    return sum(abs(one - other) for one, other in zip(shares, last, strict=True)) / (2 * sum(last))


def _is_whole(step: StepRecord, trial: TrialRecord, ranks: int) -> bool:
    """The last batch of an epoch may be smaller."""
    return len(step.shares) == ranks and step.samples in trial.sizes


def _problem(training: Training) -> str | None:
    if training.trial is not None and training.trial.problem is not None:
        return training.trial.problem
    if training.run is None or training.trial is None:
        return "the script does not use ugro.train, so it cannot be measured"
    if not training.steps:
        return _NO_STEP
    return None


def _rank(steps: Sequence[StepRecord], rank: int, training: Training, ran_out: bool) -> RankTrial:
    assert training.trial is not None
    by_share: dict[int, list[StepRecord]] = {}
    for place, step in enumerate(steps):
        is_first = step.shares[rank] not in by_share
        same = by_share.setdefault(step.shares[rank], [])
        if place >= _WARM_UP_STEPS and not is_first:  # the first of a share allocates
            same.append(step)
    found = {share: same for share, same in sorted(by_share.items()) if same}
    memory = _memory(training.trial, rank, list(found))
    points = tuple(_point(share, same, rank, memory.get(share)) for share, same in found.items())
    last = found[max(found)] if found else []
    return RankTrial(
        points,
        median([step.optimizer_s[rank] for step in last]) if last else 0.0,
        fmean(step.data_s[rank] for step in last) if last else 0.0,
        _cap(training, rank, points, ran_out),
    )


def _point(share: int, steps: Sequence[StepRecord], rank: int, memory: int | None) -> Point:
    kept = _undisturbed(steps, [step.own_s[rank] for step in steps])
    seconds = [step.own_s[rank] for step in kept]
    mean = fmean(seconds)
    deviation = math.sqrt(fmean((one - mean) ** 2 for one in seconds)) if len(seconds) > 1 else 0.1 * mean
    return Point(share, max(1e-9, mean), deviation / mean if mean > 0 else 0.0, len(seconds), memory)


def _undisturbed(steps: Sequence[StepRecord], seconds: Sequence[float]) -> list[StepRecord]:
    usual = median(seconds)
    return [step for step, one in zip(steps, seconds, strict=True) if one <= _DISTURBED * usual]


def _memory(trial: TrialRecord, rank: int, shares: Sequence[int]) -> dict[int, int]:
    if rank >= len(trial.memory_bytes) or len(shares) != 2:
        return {}
    small, large, _ = trial.memory_bytes[rank]
    return {share: used for share, used in zip(shares, (small, large), strict=True) if used}


def _cap(training: Training, rank: int, points: Sequence[Point], ran_out: bool) -> int | None:
    """How many samples the device can hold at once, if less than the batch."""
    assert training.trial is not None
    if training.plan is not None and rank < len(training.plan.caps) and (cap := training.plan.caps[rank]):
        return cap
    if ran_out and points:
        return points[-1].samples
    memory = training.trial.memory_bytes
    if rank >= len(memory) or len(points) != 2 or not all(point.memory_bytes for point in points):
        return None
    small, large, whole = memory[rank]
    per_sample = (large - small) / (points[1].samples - points[0].samples)
    if per_sample <= 0 or not whole:
        return None
    cap = int((_MOST_OF_MEMORY * whole - (small - per_sample * points[0].samples)) / per_sample)
    return max(points[1].samples, cap) if cap < training.trial.global_batch else None


def _between_own(steps: Sequence[StepRecord]) -> float:
    kept = steps[_WARM_UP_STEPS:] or steps
    return median([min(step.communication_s) for step in kept])
