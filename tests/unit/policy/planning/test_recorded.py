"""Predictions from real trials, against the trainings that followed them.

``recorded_trials.json``: three rounds of ``bench plan`` for each of three models, on nodes with 0.64, 0.32 and 0.16 of
a core. A round has the trials of each node alone, the steps of the trial of all together, and the samples per second
that trainings then had on each of the seven sets of nodes. The bars are those of the benchmark.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ugro.features.planning.model import JointTrial, LaunchPlan, NodeTrial
from ugro.features.planning.rules import Exchange, Knowledge, make_plan
from ugro.features.planning.rules_trials import About, joint_trial
from ugro.kernel.support.codec import decode
from ugro.kernel.telemetry.records import RunRecord, StepRecord, Training, TrialRecord

Nodes = tuple[str, ...]


class Round(NamedTuple):
    model: str
    plan: LaunchPlan
    measured: dict[Nodes, float]


@cache
def rounds() -> tuple[Round, ...]:
    recorded = json.loads(Path(__file__).with_name("recorded_trials.json").read_text())
    return tuple(_round(one) for one in recorded)


def _round(recorded: dict[str, Any]) -> Round:
    alone = [decode(NodeTrial, one) for one in recorded["alone"]]
    exchange = Exchange(alone[0].gradient_bytes, _together(recorded["together"], alone[0].global_batch))
    plan = make_plan("x", Knowledge({one.node: one for one in alone}, exchange), {})
    measured = {tuple(nodes.split()): speed for nodes, speed in recorded["measured"].items()}
    return Round(recorded["model"], plan, measured)


def _together(recorded: dict[str, Any], batch: int) -> JointTrial:
    nodes = tuple(recorded["nodes"])
    pairs = tuple((one, other, seconds) for one, other, seconds in recorded["pairs"])
    trial = TrialRecord(batch, nodes=nodes, exchange_s=recorded["exchange_s"], pairs=pairs, sizes=(batch, batch))
    steps = [_step(number, *one) for number, one in enumerate(recorded["steps"])]
    found = joint_trial(Training(run=RunRecord(nodes, "cpu", "adaptive"), trial=trial, steps=steps), About("", "cpu"))
    assert isinstance(found, JointTrial)
    return found


def _step(
    number: int, samples: int, step_s: float, shares: list[int], own_s: list[float], communication_s: float
) -> StepRecord:
    zero = (0.0,) * len(shares)
    spent = (communication_s,) * len(shares)
    return StepRecord(
        number, 0, samples, None, step_s, tuple(shares), tuple(own_s), zero, zero, zero, zero, spent, zero
    )


def medians(values: dict[Any, list[float]]) -> dict[Any, float]:
    return {key: median(found) for key, found in values.items()}


def test_predictions_are_near_to_what_was_measured() -> None:
    errors: dict[tuple[str, Nodes], list[float]] = defaultdict(list)
    for model, plan, measured in rounds():
        predicted = {frozenset(one.nodes): one.samples_per_s for one in plan.predictions}
        for nodes, speed in measured.items():
            errors[model, nodes].append(predicted[frozenset(nodes)] / speed - 1)
    assert (len(errors), sum(map(len, errors.values()))) == (21, 63)
    found = {key: abs(error) for key, error in medians(errors).items()}
    assert median(found.values()) <= 0.10, found
    assert max(found.values()) <= 0.25, found


def test_two_thirds_of_what_was_measured_lie_within_what_a_plan_says_of_its_error() -> None:
    within: dict[bool, list[bool]] = defaultdict(list)
    for _, plan, measured in rounds():
        predicted = {frozenset(one.nodes): one for one in plan.predictions}
        for nodes, speed in measured.items():
            one = predicted[frozenset(nodes)]
            within[len(nodes) > 1].append(abs(speed / one.samples_per_s - 1) <= one.error)
    assert {is_several: len(found) for is_several, found in within.items()} == {False: 27, True: 36}
    for is_several, found in within.items():
        assert 0.6 <= sum(found) / len(found) <= 0.75, (is_several, sum(found))


def test_who_follows_a_plan_is_hardly_slower_than_with_the_best_set() -> None:
    speeds: dict[tuple[str, frozenset[str]], list[float]] = defaultdict(list)
    for model, _, measured in rounds():
        for nodes, speed in measured.items():
            speeds[model, frozenset(nodes)].append(speed)
    usual = medians(speeds)
    for model, plan, _ in rounds():
        assert plan.best is not None
        best = max(speed for (one, _), speed in usual.items() if one == model)
        assert best / usual[model, frozenset(plan.best.nodes)] <= 1.05, (model, plan.best.nodes)
