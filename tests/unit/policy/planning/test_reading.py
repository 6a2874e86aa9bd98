"""Trials are read from what ranks wrote: what is not there, or not sensible, is said and not guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ugro.features.planning.model import JointTrial, NodeTrial
from ugro.features.planning.rules_trials import About, joint_trial, node_trial, that_matter
from ugro.kernel.telemetry.records import Training, read

ABOUT = About("gpu1", "RTX 4070", "2026-01-01T00:00:00+00:00", 7)


def record(kind: str, **fields: Any) -> bytes:
    return json.dumps({"kind": kind, "time": 1.0, "attempt": 1, "rank": 0, **fields}).encode()


def step(number: int, shares: list[int], own_s: list[float], communication_s: float = 0.0) -> bytes:
    zero = [0.0] * len(shares)
    return record(
        "profile", step=number, epoch=0, samples=sum(shares), loss=1.0, shares=shares, own_s=own_s,
        step_s=max(own_s) + communication_s, data_s=[0.01 * one for one in own_s], forward_s=zero, backward_s=zero,
        waiting_s=zero, communication_s=[communication_s] * len(shares), optimizer_s=[0.01] * len(shares),
    )  # fmt: skip


def beginning(**fields: Any) -> list[bytes]:
    return [
        record("run", nodes=["gpu1"], device="cpu", mode="off"),
        record("model", gradient_bytes=4000, parameters=1000, comm_hook=None),
        record("trial", **{"global_batch": 96, "least": 1, "sizes": [16, 96], "nodes": ["gpu1"], **fields}),
    ]


def solo(fixed_s: float = 0.1, per_sample_s: float = 0.01, **fields: Any) -> Training:
    steps = []
    for number in range(16):
        samples = (16, 96)[number // 4 % 2]
        first = 3.0 if number in (0, 4) else 1.0  # allocates
        steps.append(step(number, [samples], [first * (fixed_s + samples * per_sample_s)]))
    return read([*beginning(**fields), *steps])


def found_in(training: Training, about: About = ABOUT) -> NodeTrial:
    found = node_trial(training, about)
    assert isinstance(found, NodeTrial), found
    return found


def test_a_trial_at_two_sizes_gives_both_points_without_the_first_steps() -> None:
    found = found_in(solo())
    [rank] = found.ranks
    assert [point.samples for point in rank.points] == [16, 96]
    assert [point.seconds for point in rank.points] == pytest.approx([0.26, 1.06])
    assert [point.steps for point in rank.points] == [6, 7]
    assert (found.global_batch, found.parameters, found.gradient_bytes, found.job) == (96, 1000, 4000, 7)
    assert rank.data_s == pytest.approx(0.0106)


def test_a_disturbed_step_and_one_of_another_size_do_not_count() -> None:
    training = read(
        [*beginning(), *(step(number, [96], [1.0]) for number in range(8)), step(8, [96], [9.0]), step(9, [5], [0.1])]
    )
    [rank] = found_in(training).ranks
    assert [(point.samples, point.seconds) for point in rank.points] == [(96, 1.0)]


@pytest.mark.parametrize(
    ("training", "why"),
    [
        (Training(), "does not use ugro.train"),
        (read([record("trial", problem="another library runs the steps")]), "another library"),
        (read(beginning()), "no step was complete"),
        (read([*beginning(), step(0, [16], [0.2])]), "no step was complete"),
        (read([beginning()[0], beginning()[2], step(0, [16], [0.2])]), "run.wrap"),
    ],
)
def test_what_measured_nothing_says_why(training: Training, why: str) -> None:
    found = node_trial(training, ABOUT)
    assert isinstance(found, str)
    assert why in found


def test_memory_at_two_sizes_says_how_much_a_device_can_hold() -> None:
    [rank] = found_in(solo(memory_bytes=[[2_600, 10_600, 8_000]])).ranks
    assert rank.cap == 96  # it has held that many, whatever the line says
    [rank] = found_in(solo(memory_bytes=[[2_600, 3_400, 1_000_000]])).ranks
    assert rank.cap is None
    assert [point.memory_bytes for point in rank.points] == [2_600, 3_400]


def test_a_trial_that_ran_out_of_memory_is_used_up_to_what_it_held() -> None:
    training = read([*beginning(), *(step(number, [16], [0.3]) for number in range(4))])
    [rank] = found_in(training, About("gpu1", "RTX", ran_out_of_memory=True)).ranks
    assert rank.cap == 16


def test_a_joint_trial_counts_the_steps_of_its_last_shares() -> None:
    pairs = [[0, 1, 0.2], [0, 9, 1.0]]  # of two ranks, and of one that there is not
    lines = [
        record("run", nodes=["a", "b"], device="cpu", mode="adaptive"),
        record("model", gradient_bytes=4000, parameters=1000, comm_hook=None),
        record("trial", global_batch=96, sizes=[96, 96], nodes=["a", "b"], exchange_s=0.2, pairs=pairs),
        *(step(number, [48, 48], [0.5, 1.0], 0.1) for number in range(5)),
        *(step(number, [64, 32], [0.7, 0.6], 0.1) for number in range(5, 12)),
        step(12, [4, 0], [0.1, 0.1]),  # the rest of an epoch
    ]
    found = joint_trial(read(lines), ABOUT)
    assert isinstance(found, JointTrial)
    assert found.shares == pytest.approx((64, 32))
    assert found.own_s == pytest.approx((0.7, 0.6))
    assert found.step_s == pytest.approx(0.8)
    assert found.communication_s == pytest.approx(0.1)
    assert [(pair.first, pair.second, pair.seconds) for pair in found.pairs] == [("a", "b", 0.2)]


def test_a_joint_trial_also_counts_steps_whose_shares_are_nearly_the_last() -> None:
    lines = [
        record("run", nodes=["a", "b"], device="cpu", mode="adaptive"),
        record("trial", global_batch=100, sizes=[100, 100], nodes=["a", "b"]),
        *(step(number, [50, 50], [0.5, 1.0], 0.1) for number in range(5)),
        *(step(number, [60, 40], [0.6, 0.8], 0.1) for number in range(5, 8)),
        *(step(number, [64, 36], [0.8, 0.6], 0.1) for number in range(8, 11)),
    ]
    found = joint_trial(read(lines), ABOUT)
    assert isinstance(found, JointTrial)
    assert found.shares == pytest.approx((62, 38))
    assert found.own_s == pytest.approx((0.7, 0.7))


def test_a_record_that_is_no_trial_is_skipped() -> None:
    for bad in ({"global_batch": -1}, {"pairs": [[0, 1]]}, {"memory_bytes": "much"}, {"exchange_s": "long"}):
        assert read([record("trial", **bad)]).trial is None


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--epochs", "10", "--size", "4"], ("--size", "4")),
        (["--epochs=10", "--seed", "-1", "--batch=8"], ("--batch=8",)),
        (["--lr", "0.1", "--flag", "--max_epochs", "3", "data"], ("--flag", "data")),
        (["--seed", "--fast"], ("--fast",)),
        (["epochs", "--layers", "2"], ("epochs", "--layers", "2")),
    ],
)
def test_arguments_that_do_not_change_the_speed_are_left_out(arguments: list[str], left: tuple[str, ...]) -> None:
    assert that_matter(arguments) == left


def test_a_trial_says_whether_the_training_itself_is_local_sgd() -> None:
    assert found_in(solo(sync="local")).is_of_local
    assert not found_in(solo(sync="step")).is_of_local
    assert not found_in(solo()).is_of_local
