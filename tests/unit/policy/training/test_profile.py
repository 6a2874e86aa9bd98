"""What holds a training back, told from its records: made-up ones, and those of simulated trainings."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rig.training import Pretend
from ugro.features.training.model import FindingKind, JobProfile
from ugro.features.training.rules_profile import profile
from ugro.kernel.telemetry.records import read
from ugro.train.rules.shares import Mode


def profiled(pretend: Pretend, steps: int = 60, window: int | None = None) -> JobProfile:
    found = profile(read(pretend.run(steps)), 1, window)
    assert found is not None
    return found


def kinds(found: JobProfile) -> list[FindingKind]:
    return [one.kind for one in found.findings]


def test_equal_ranks_are_balanced() -> None:
    found = profiled(Pretend([0.001] * 3))
    assert kinds(found) == [FindingKind.BALANCED]
    assert found.imbalance < 1.05
    assert found.use > 0.9
    assert "none of the 3 ranks waits" in found.verdict.words


def test_unequal_ranks_that_were_balanced_are_judged_by_the_newest_plan() -> None:
    pretend = Pretend([0.001, 0.002, 0.004])
    found = profiled(pretend)
    assert kinds(found) == [FindingKind.BALANCED]
    assert found.first_step > 0, "the steps before the plan are history"
    assert profiled(Pretend([0.001, 0.002, 0.004]), window=60).first_step == 0, "unless they are asked for"


def test_a_slow_rank_that_computes_is_named_and_balancing_is_the_remedy() -> None:
    found = profiled(Pretend([0.001, 0.001, 0.003], mode=Mode.OFF))
    verdict = found.verdict
    assert (verdict.kind, verdict.ranks) == (FindingKind.SLOW_RANK, (2,))
    assert "gpu2 is slowest: it computes 3" in verdict.words
    assert "UGRO_BALANCE=adaptive" in verdict.remedy
    assert found.lost_share == pytest.approx(4 / 9, abs=0.05)
    assert found.lost_s == pytest.approx(found.lost_share * found.step_s * 3 * found.steps)


def test_a_slow_rank_that_waits_for_data_is_told_apart() -> None:
    found = profiled(Pretend([0.001] * 3, data_s=[0.0, 0.05, 0.0], mode=Mode.OFF))
    assert (found.verdict.kind, found.verdict.ranks) == (FindingKind.SLOW_RANK, (1,))
    assert "gpu1 is slowest because it waits for data" in found.verdict.words
    assert "gpu1's own disk" in found.verdict.remedy
    assert FindingKind.INPUT not in kinds(found)


def test_ranks_that_take_turns_at_being_slowest_are_unsteady() -> None:
    found = profiled(Pretend([0.001] * 4, noise=0.25, mode=Mode.OFF))
    assert found.verdict.kind is FindingKind.UNSTEADY


def test_where_everybody_waits_for_data_the_input_is_the_verdict() -> None:
    found = profiled(Pretend([0.001] * 2, data_s=[0.05, 0.05]))
    assert found.verdict.kind is FindingKind.INPUT
    assert "num_workers" in found.verdict.remedy


def test_one_step_in_four_that_waits_for_data_is_seen() -> None:
    """As with four workers that cannot keep up: the median of what was waited is nothing."""
    pretend = Pretend([0.001], batch=32)
    pretend.run(60)
    for number, record in enumerate(pretend.records):
        if record["kind"] == "profile" and number % 4 == 0:
            for part in ("data_s", "own_s"):
                record[part] = [record[part][0] + 0.2]
            record["step_s"] += 0.2
    found = profile(read(json.dumps(record).encode() for record in pretend.records), 1)
    assert found is not None
    assert (found.verdict.kind, found.passed_over) == (FindingKind.INPUT, 0)
    assert found.ranks[0].data_s == pytest.approx(0.05, rel=0.1)


def test_a_slow_network_is_told_with_its_bandwidth_and_what_would_help() -> None:
    found = profiled(Pretend([0.001] * 2, communication_s=0.05, gradient_bytes=50 << 20))
    words, remedy = found.verdict.words, found.verdict.remedy
    assert found.verdict.kind is FindingKind.NETWORK
    assert "50.0 MiB at an apparent 1000.0 MiB/s" in words
    assert 'compress="fp16"' in remedy
    assert "local SGD (--train-sync local)" in remedy
    assert "twice the global batch" in remedy


def test_small_gradients_are_not_worth_compressing() -> None:
    found = profiled(Pretend([0.01] * 2, communication_s=0.3, gradient_bytes=1000))
    network = next(one for one in found.findings if one.kind is FindingKind.NETWORK)
    assert "fp16" not in network.remedy
    assert "half as often" in network.remedy


def test_a_rank_that_is_not_worth_having_is_told_first() -> None:
    found = profiled(Pretend([0.001, 0.001, 0.02], fixed_s=[0.002, 0.002, 0.2], communication_s=0.01))
    assert found.verdict.kind is FindingKind.FEWER_RANKS
    assert "without gpu2 this job would be" in found.verdict.words
    assert "gpu0 and gpu1 alone: --nodes 2" in found.verdict.remedy
    assert found.verdict.ranks == (2,)


def test_the_trainings_own_advice_goes_first() -> None:
    pretend = Pretend([0.001] * 3)
    pretend.run(40)
    words = "without gpu0 this job would be 1.50 times as fast"
    pretend._put(
        "advice", step=32, words=words, predicted_s=0.3, best_s=0.2, best_ranks=[1, 2], without_s=[0.2, None, None]
    )
    found = profile(read(json.dumps(record).encode() for record in pretend.records), 1)
    assert found is not None
    assert found.verdict.words == words
    assert found.verdict.share == pytest.approx(1 / 3)


def test_a_step_that_hardly_depends_on_its_samples_asks_for_a_larger_batch() -> None:
    found = profiled(Pretend([0.0001, 0.0003], fixed_s=[0.03, 0.03], mode=Mode.ADAPTIVE), steps=120)
    assert FindingKind.FIXED_COST in kinds(found), found.findings
    fixed = next(one for one in found.findings if one.kind is FindingKind.FIXED_COST)
    assert "global batch twice as large" in fixed.remedy


@pytest.mark.parametrize(("waiting_s", "words"), [(0.0, "most of a step"), (0.05, "a large part of a step")])
def test_most_of_a_step_is_more_than_half_of_it(waiting_s: float, words: str) -> None:
    found = profiled(Pretend([0.0001, 0.0003], fixed_s=[0.03, 0.03], communication_s=waiting_s), steps=120)
    fixed = next(one for one in found.findings if one.kind is FindingKind.FIXED_COST)
    assert fixed.words.startswith(f"{words} does not depend on the number of samples"), fixed.words
    assert (fixed.share > 0.5) == words.startswith("most")


def test_what_the_script_does_between_the_parts_is_told() -> None:
    found = profiled(Pretend([0.001] * 2, other_s=0.03))
    assert found.verdict.kind is FindingKind.SCRIPT


def test_a_checkpoint_between_two_steps_is_no_part_of_a_usual_step() -> None:
    pretend = Pretend([0.001] * 2)
    pretend.run(30)
    record = [one for one in pretend.records if one["kind"] == "profile"][-5]
    record["own_s"] = [one + 30 for one in record["own_s"]]
    record["step_s"] += 30
    found = profile(read(json.dumps(record).encode() for record in pretend.records), 1)
    assert found is not None
    assert found.passed_over == 1
    assert found.step_s < 1
    assert kinds(found) == [FindingKind.BALANCED]


def test_two_steps_are_too_few_and_none_are_no_profile() -> None:
    assert profile(read(Pretend([0.001]).run(0)), 1) is None
    assert profiled(Pretend([0.001] * 2), steps=2).verdict.kind is FindingKind.TOO_EARLY


def test_what_makes_no_sense_is_passed_over() -> None:
    lines = Pretend([0.001] * 2).run(5)
    good = json.loads(lines[-1])
    broken: list[dict[str, Any]] = [
        {**good, "own_s": [1.0]}, {**good, "own_s": "x"}, {**good, "shares": []}, {**good, "step_s": -1},
        {**good, "step_s": float("nan")}, {**good, "step": None}, {**good, "shares": [True, 1]},
        {**good, "kind": "advice", "best_ranks": [99], "words": "x", "best_s": 0.1, "predicted_s": 1.0},
        {**good, "kind": "plan", "caps": 3}, {**good, "kind": "run", "nodes": None}, {"kind": ["x"]},
    ]  # fmt: skip
    noise = [b"", b"\xff", b"[" * 100_000, b"[]", *(json.dumps(one).encode() for one in broken)]
    clean, dirty = read(lines), read([*lines, *noise])
    assert [step.step for step in dirty.steps] == [step.step for step in clean.steps]
    found = profile(dirty, 1)
    assert found is not None
    assert kinds(found) == [FindingKind.BALANCED], "advice about ranks that are not there is none"


@given(
    st.lists(st.floats(1e-5, 1e-2), min_size=1, max_size=6),
    st.floats(0, 0.2),
    st.floats(0, 0.1),
    st.integers(1, 30),
    st.sampled_from(list(Mode)),
)
def test_whatever_it_is_the_parts_add_up_and_there_is_a_verdict(
    per_sample_s: list[float], communication_s: float, data_s: float, steps: int, mode: Mode
) -> None:
    data = [data_s * (rank % 2) for rank in range(len(per_sample_s))]
    found = profiled(Pretend(per_sample_s, data_s=data, communication_s=communication_s, mode=mode), steps)
    for rank in found.ranks:
        own = rank.data_s + rank.forward_s + rank.backward_s + rank.optimizer_s + rank.other_s
        assert own == pytest.approx(rank.own_s, rel=1e-6, abs=1e-9)
        assert rank.own_s + rank.waiting_s + rank.communication_s == pytest.approx(found.step_s, rel=1e-6, abs=1e-9)
    assert found.imbalance >= 1 - 1e-9
    assert 0 <= found.lost_share <= 1
    assert 0 <= found.use <= 1
    assert found.verdict.words
    assert all(math.isfinite(one.share) for one in found.findings)
    if mode is Mode.OFF and len(per_sample_s) > 1 and found.lost_share > 0.2 and steps >= 3:
        assert {FindingKind.SLOW_RANK, FindingKind.FEWER_RANKS} & set(kinds(found))


def test_a_training_with_local_sgd_is_told_about_rounds() -> None:
    pretend = Pretend([0.001] * 2, communication_s=0.05, gradient_bytes=50 << 20)
    pretend.run(60)
    for record in pretend.records:
        if record["kind"] == "run":
            record["sync"] = "local"
    found = profile(read(json.dumps(record).encode() for record in pretend.records), 1)
    assert found is not None
    network = next(one for one in found.findings if one.kind is FindingKind.NETWORK)
    assert "exchanging models" in network.words
    assert "longer rounds" in network.remedy
    assert FindingKind.FEWER_RANKS not in kinds(found)


PARTS = ("own_s", "data_s", "forward_s", "backward_s", "waiting_s", "communication_s", "optimizer_s")


def written(ranks: int, share: int, **times: float) -> list[bytes]:
    """Steps as a job may write them, whatever it did."""
    parts = {name: [times.get(name, 1e-3)] * ranks for name in PARTS}
    step: dict[str, Any] = {"kind": "profile", "epoch": 0, "samples": 1, "loss": 1, "step_s": times.get("step_s", 0.5)}
    return [json.dumps({**step, "step": at, "shares": [share] * ranks, **parts}).encode() for at in range(6)]


def test_a_profile_of_any_numbers_is_made_in_a_moment() -> None:
    """Each is made in a thread of the agent, of which there are few."""
    for ranks, share in ((4096, 1), (3, 1 << 60), (12, 1 << 60)):
        began_s = time.thread_time()
        assert profile(read(written(ranks, share)), 1, None) is not None
        assert time.thread_time() - began_s < 30, f"{ranks} ranks"


def test_an_exchange_that_is_longer_than_its_step_is_a_finding() -> None:
    found = profile(read(written(2, 8, communication_s=1.0)), 1, None)
    assert found is not None
    assert FindingKind.NETWORK in kinds(found)
    assert profile(read(written(2, 8, communication_s=1.0, step_s=0.0)), 1, None) is not None
