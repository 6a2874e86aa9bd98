"""What sets of nodes are predicted to do: sensible for any trial, and right where the truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.planning.model import JointTrial, Links, NodeTrial, Pair, Point, Prediction, RankTrial, compared
from ugro.features.planning.rules import Curve, Exchange, Knowledge, Link, make_plan, predict
from ugro.train.rules.shares import Mode

BATCH, GRADIENTS = 96, 8_000_000
FREE = Link(1e15)


def trial(
    node: str, per_sample_s: float, fixed_s: float = 0.0, *, cap: int | None = None, batch: int = BATCH, **more: object
) -> NodeTrial:
    points = tuple(Point(n, fixed_s + n * per_sample_s, 0.0, 12) for n in (max(1, batch // 6), batch))
    rank = RankTrial(points, optimizer_s=fixed_s, cap=cap)
    return replace(NodeTrial(node, "a device", (rank,), batch, 1000, GRADIENTS), **more)  # type: ignore[arg-type]


def known(*trials: NodeTrial, link: Link | None = FREE, joint: JointTrial | None = None) -> Knowledge:
    nodes = [one.node for one in trials]
    links = {frozenset((one, other)): link for one in nodes for other in nodes if one < other} if link else {}
    return Knowledge({one.node: one for one in trials}, Exchange(GRADIENTS, joint, links))


def predicted(knowledge: Knowledge, *nodes: str) -> Prediction:
    found = predict(nodes, knowledge)
    assert found is not None
    return found


_cost = st.tuples(st.floats(0.0005, 0.05), st.floats(0.0, 0.2))
_costs = st.lists(_cost, min_size=1, max_size=4)


@given(_costs)
def test_shares_are_the_whole_batch_and_the_speed_is_that_of_a_step(costs: list[tuple[float, float]]) -> None:
    trials = [trial(f"n{place}", *cost) for place, cost in enumerate(costs)]
    for one in make_plan("x", known(*trials), {}).predictions:
        assert sum(one.shares) == BATCH
        assert len(one.shares) == len(one.nodes)
        assert one.samples_per_s == pytest.approx(BATCH / one.step_s)
        assert 0 < one.error < 1


@given(_costs, _cost)
def test_one_more_node_by_a_free_link_never_makes_the_best_slower(
    costs: list[tuple[float, float]], another: tuple[float, float]
) -> None:
    trials = [trial(f"n{place}", *cost) for place, cost in enumerate(costs)]
    before = max(one.samples_per_s for one in make_plan("x", known(*trials), {}).predictions)
    after = max(one.samples_per_s for one in make_plan("x", known(*trials, trial("new", *another)), {}).predictions)
    assert after >= before


@given(_costs, st.floats(1e6, 1e9), st.floats(1.1, 100))
def test_a_faster_link_never_lowers_a_prediction(
    costs: list[tuple[float, float]], bytes_per_s: float, times: float
) -> None:
    trials = [trial(f"n{place}", *cost) for place, cost in enumerate(costs)]
    slow = make_plan("x", known(*trials, link=Link(bytes_per_s)), {})
    fast = {one.nodes: one for one in make_plan("x", known(*trials, link=Link(times * bytes_per_s)), {}).predictions}
    for one in slow.predictions:
        assert fast[one.nodes].samples_per_s >= one.samples_per_s * (1 - 1e-9)


def test_equal_nodes_by_a_free_link_are_as_fast_as_all_of_them_together() -> None:
    found = predicted(known(trial("a", 0.01), trial("b", 0.01), trial("c", 0.01)), "a", "b", "c")
    assert found.samples_per_s == pytest.approx(300, rel=0.01)
    assert found.shares == (32, 32, 32)


def test_a_node_that_is_hardly_moving_is_not_chosen() -> None:
    plan = make_plan("x", known(trial("fast", 0.01), trial("stuck", 100.0, 50.0)), {})
    assert plan.best.nodes == ("fast",)
    both = next(one for one in plan.predictions if len(one.nodes) == 2)
    assert both.why == "stuck costs more waiting than it gives"
    [note] = plan.notes
    assert note.startswith("more nodes do not pay: steps would hardly be shorter")


def test_the_slow_link_counts_only_in_sets_that_have_it() -> None:
    trials = (trial("a", 0.01), trial("b", 0.01), trial("c", 0.01))
    links = {frozenset("ab"): Link(1e12), frozenset("ac"): Link(4e6), frozenset("bc"): Link(4e6)}
    plan = make_plan("x", Knowledge({one.node: one for one in trials}, Exchange(GRADIENTS, None, links)), {})
    assert plan.best.nodes == ("a", "b")
    assert predicted(known(*trials), "a", "b", "c").samples_per_s > plan.predictions[1].samples_per_s


def test_where_the_exchange_costs_more_than_it_gives_one_node_is_best_and_a_larger_batch_is_named() -> None:
    plan = make_plan("x", known(trial("a", 0.001), trial("b", 0.001), link=Link(50e6)), {})
    assert plan.best.nodes == ("a",)
    [note] = plan.notes
    assert note.startswith("synchronising every step does not pay: the exchange of")
    assert "with a global batch of 768" in note
    larger = replace(known(trial("a", 0.001), trial("b", 0.001), link=Link(50e6)), global_batch=768)
    assert predicted(larger, "a", "b").samples_per_s > 1.1 * predicted(larger, "a").samples_per_s


def test_of_two_sets_that_are_alike_the_smaller_one_is_best() -> None:
    plan = make_plan("x", known(trial("a", 0.01), trial("b", 0.5)), {})
    assert plan.best.nodes == ("a",)
    assert plan.predictions[1].why == "not clearly faster for b"


def test_a_further_node_must_promise_more_than_predictions_are_off() -> None:
    little, more = (make_plan("x", known(trial("a", 0.01), trial("b", slow)), {}) for slow in (0.3, 0.1))
    assert 1 < little.predictions[1].samples_per_s / little.best.samples_per_s < 1.05
    assert little.best.nodes == ("a",)
    assert more.best.nodes == ("a", "b")
    assert more.best.samples_per_s > 1.05 * more.predictions[1].samples_per_s


def test_a_link_that_nobody_measured_is_assumed_and_makes_the_prediction_less_certain() -> None:
    trials = (trial("a", 0.01), trial("b", 0.01))
    assumed, measured = (predicted(known(*trials, link=link), "a", "b") for link in (None, Link(110e6, 0.0005)))
    assert assumed.links is Links.ASSUMED
    assert measured.links is Links.BENCH
    assert assumed.samples_per_s == measured.samples_per_s
    assert assumed.error > measured.error > predicted(known(*trials, link=None), "a").error
    [note] = make_plan("x", known(*trials, link=None), {}).notes
    assert "not measured" in note


def test_a_device_that_can_hold_less_accumulates_or_gets_less() -> None:
    able = known(trial("a", 0.01, 0.1, cap=24, can_accumulate=True))
    assert predicted(able, "a").accumulate == 4
    assert predict(("a",), known(trial("a", 0.01, cap=24))) is None
    both = predicted(known(trial("a", 0.01, cap=24), trial("b", 0.02)), "a", "b")
    assert both.shares == (24, 72)


def test_more_ranks_than_samples_are_no_set_and_a_least_share_is_kept_as_far_as_it_goes() -> None:
    one = known(trial("a", 0.01, batch=1), trial("b", 0.01, batch=1))
    assert predict(("a", "b"), one) is None
    assert predicted(one, "a").shares == (1,)
    assert predicted(known(trial("a", 0.01, least=8), trial("b", 1.0, least=8)), "a", "b").shares == (88, 8)
    few = known(trial("a", 0.01, batch=8, least=8), trial("b", 0.04, batch=8, least=8))
    assert predicted(few, "a", "b").shares == (4, 4)


def test_nodes_that_failed_to_train_together_are_predicted_alone_only() -> None:
    plan = make_plan("x", replace(known(trial("a", 0.01), trial("b", 0.01)), can_join=False), {})
    assert [one.nodes for one in plan.predictions] == [("a",), ("b",)]
    assert "failed" in plan.notes[0]


def test_without_balancing_shares_are_equal_and_the_slow_node_decides() -> None:
    both = replace(known(trial("a", 0.01), trial("b", 0.04)), balance=Mode.OFF)
    assert predicted(both, "a", "b").shares == (48, 48)
    assert predicted(both, "a", "b").step_s == pytest.approx(48 * 0.04, rel=0.01)


def joint(*trials: NodeTrial, shares: tuple[int, ...], times: float = 1.0, exchange_s: float = 0.05) -> JointTrial:
    """In company each rank takes ``times`` as long; the exchange with the last node is five times as slow."""
    nodes = tuple(one.node for one in trials)
    own = [times * Curve.of(one.ranks[0]).seconds(share) for one, share in zip(trials, shares, strict=True)]
    pairs = [
        Pair(one, other, exchange_s if other != nodes[-1] else 5 * exchange_s)
        for place, one in enumerate(nodes)
        for other in nodes[place + 1 :]
    ]
    whole_s = 5 * exchange_s * 2 * (len(nodes) - 1) / len(nodes)
    return JointTrial(nodes, shares, tuple(own), whole_s, max(own) + whole_s, whole_s, tuple(pairs))


def test_a_joint_trial_is_predicted_as_it_was_measured() -> None:
    trials = (trial("a", 0.01), trial("b", 0.02), trial("c", 0.04))
    together = joint(*trials, shares=(55, 27, 14), times=1.2)
    found = predicted(known(*trials, joint=together), "a", "b", "c")
    assert found.step_s == pytest.approx(together.step_s, rel=0.03)
    assert found.links is Links.TRIAL
    assert found.error < predicted(known(*trials, joint=together), "a", "b").error, "that set was not tried"


def test_a_set_without_the_slow_partner_waits_less_for_its_exchange() -> None:
    trials = (trial("a", 0.01), trial("b", 0.02), trial("c", 0.04))
    knowledge = known(*trials, joint=joint(*trials, shares=(55, 27, 14)))
    assert predicted(knowledge, "a", "b").communication_s == pytest.approx(0.05, rel=0.01)
    assert predicted(knowledge, "a", "c").communication_s == pytest.approx(0.25, rel=0.01)
    assert predicted(knowledge, "a").communication_s == 0


def test_noise_of_several_ranks_adds_up_and_widens_the_error() -> None:
    noisy = [
        replace(one, ranks=(replace(one.ranks[0], points=tuple(replace(p, spread=0.2) for p in one.ranks[0].points)),))
        for one in (trial("a", 0.01), trial("b", 0.01))
    ]
    quiet = predicted(known(trial("a", 0.01), trial("b", 0.01)), "a", "b")
    loud = predicted(known(*noisy), "a", "b")
    assert loud.samples_per_s < 0.95 * quiet.samples_per_s
    assert loud.error > quiet.error


def test_a_curve_keeps_what_was_measured_and_never_falls() -> None:
    rank = RankTrial((Point(16, 0.30, 0.0, 4), Point(96, 0.25, 0.0, 4)))
    curve = Curve.of(rank)
    assert curve.seconds(16) == pytest.approx(0.30)
    times = [curve.seconds(samples) for samples in range(1, 200)]
    assert times == sorted(times)
    straight = Curve.of(RankTrial((Point(10, 0.2, 0.0, 4), Point(20, 0.3, 0.0, 4)), optimizer_s=0.05))
    assert straight.fixed_s == pytest.approx(0.1)
    assert straight.seconds(5) == pytest.approx(0.15)
    assert straight.seconds(40) == pytest.approx(0.5)


def test_a_high_speed_is_shown_as_people_write_it() -> None:
    fast = Prediction(("a",), 76027.4, 0.05, 0.001, 0.0, (96,))
    assert compared(fast, 80000.0) == "76,027 samples/s ± 5 %; measured 80,000, 5 % more"
    assert compared(replace(fast, samples_per_s=4.567), None) == "4.57 samples/s ± 5 %"
