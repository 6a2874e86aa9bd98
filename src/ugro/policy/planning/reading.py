"""Reads trials from the records that their ranks wrote. Records come from nodes: what is not sensible is a problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ugro.core.planning import JointTrial, ModelSize, NodeTrial, Pair, Point, RankTrial
from ugro.core.training import ModelRecord, StepRecord, Training, TrialRecord
from ugro.policy.recipes.memory import MOMENTS

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
