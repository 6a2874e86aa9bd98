"""A batch is split exactly: whole, within bounds, and no other split is done sooner."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import Unsatisfiable
from ugro.train.rules.shares import Bounds, Cost, advise, in_proportion, slowest_s, split, uniform

_part = st.floats(0, 3)
_per_sample = st.floats(0.01, 5)
_cost = st.builds(Cost, _part, _part, _per_sample, st.none() | st.integers(1, 6))


@st.composite
def _bounded(draw: st.DrawFn, most_ranks: int = 3, most_samples: int = 14) -> tuple[list[Cost], int, list[Bounds]]:
    costs = draw(st.lists(_cost, min_size=1, max_size=most_ranks))
    bounds = []
    for _ in costs:
        least = draw(st.integers(0, 3))
        bounds.append(Bounds(least, draw(st.none() | st.integers(least, most_samples))))
    least = sum(bound.least for bound in bounds)
    most = sum(most_samples if bound.most is None else bound.most for bound in bounds)
    return costs, draw(st.integers(least, max(least, min(most, most_samples)))), bounds


@given(_bounded(most_ranks=8, most_samples=200), st.integers(1, 9))
def test_a_split_is_whole_and_within_bounds(case: tuple[list[Cost], int, list[Bounds]], granule: int) -> None:
    costs, total, bounds = case
    shares = split(costs, total, bounds, granule)
    assert sum(shares) == total
    for share, bound in zip(shares, bounds, strict=True):
        assert share >= min(bound.least, total)
        assert bound.most is None or share <= bound.most


@given(_bounded())
def test_no_other_split_is_done_sooner(case: tuple[list[Cost], int, list[Bounds]]) -> None:
    costs, total, bounds = case
    best = min(
        slowest_s(costs, shares)
        for shares in product(
            *(range(bound.least, (total if bound.most is None else min(total, bound.most)) + 1) for bound in bounds)
        )
        if sum(shares) == total
    )
    assert slowest_s(costs, split(costs, total, bounds)) == best


@given(st.lists(_cost, min_size=1, max_size=8), st.integers(8, 500))
def test_a_split_is_never_worse_than_a_uniform_one(costs: list[Cost], total: int) -> None:
    shares = split(costs, total, [Bounds()] * len(costs))
    assert slowest_s(costs, shares) <= slowest_s(costs, uniform(total, len(costs)))


@given(st.lists(_cost, min_size=1, max_size=6), st.integers(6, 300))
def test_one_more_sample_takes_none_from_anybody(costs: list[Cost], total: int) -> None:
    bounds = [Bounds()] * len(costs)
    before, after = split(costs, total, bounds), split(costs, total + 1, bounds)
    assert all(more >= less for less, more in zip(before, after, strict=True))


@given(st.lists(_cost, min_size=2, max_size=6), st.integers(6, 300), st.floats(0.1, 1))
def test_who_becomes_faster_gets_no_less(costs: list[Cost], total: int, factor: float) -> None:
    bounds = [Bounds()] * len(costs)
    first = costs[0]
    faster = Cost(first.per_step_s * factor, first.per_micro_s * factor, first.per_sample_s * factor, first.cap)
    assert split([faster, *costs[1:]], total, bounds)[0] >= split(costs, total, bounds)[0]


@given(st.integers(1, 40), st.integers(1, 6))
def test_shares_are_multiples_of_the_granule_but_for_what_is_left(granules: int, ranks: int) -> None:
    costs = [Cost(per_sample_s=1.0 + rank) for rank in range(ranks)]
    shares = split(costs, granules * 8, [Bounds(0)] * ranks, granule=8)
    assert all(share % 8 == 0 for share in shares)


@given(st.integers(0, 1000), st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_a_tail_is_shared_in_proportion_and_nothing_is_lost(total: int, weights: list[float]) -> None:
    shares = in_proportion(total, weights)
    assert sum(shares) == total
    if sum(weights) > 0:
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - total * weight / sum(weights)) < 1 + 1e-6


def test_a_device_that_cannot_hold_more_leaves_the_rest_to_others() -> None:
    fast, slow = Cost(per_sample_s=1.0), Cost(per_sample_s=4.0)
    assert split([fast, slow], 10, [Bounds(), Bounds()]) == (8, 2)
    assert split([fast, slow], 10, [Bounds(most=5), Bounds()]) == (5, 5)


def test_a_share_beyond_the_memory_costs_another_micro_batch() -> None:
    cost = Cost(per_step_s=1.0, per_micro_s=2.0, per_sample_s=0.5, cap=4)
    assert [cost.micro_batches(count) for count in (0, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert cost.seconds(9) == 1.0 + 3 * 2.0 + 4.5


@pytest.mark.parametrize("bounds", [[Bounds(6), Bounds(6)], [Bounds(1, 3), Bounds(1, 3)]])
def test_what_cannot_be_shared_is_refused_with_a_hint(bounds: list[Bounds]) -> None:
    with pytest.raises(Unsatisfiable) as refused:
        split([Cost(), Cost()], 10, bounds)
    assert refused.value.hint


def test_a_rank_whose_fixed_cost_is_too_high_is_advised_against() -> None:
    costs = [Cost(per_sample_s=0.01), Cost(per_step_s=2.0, per_sample_s=0.01)]
    advice = advise(costs, 100, 0.1, ["gpu1", "gpu2"])
    assert advice.words == f"without gpu2 this job would be {2.11 / 1.0:.2f} times as fast"
    assert advice.best.ranks == (0,)
    assert advice.without[0] is not None
    assert advice.without[0].seconds > advice.all_ranks.seconds


def test_communication_that_costs_more_than_it_brings_is_advised_against() -> None:
    costs = [Cost(per_sample_s=0.01), Cost(per_sample_s=0.02), Cost(per_sample_s=0.04)]
    assert advise(costs, 70, 0.01, "abc").words == "every rank is worth having"
    assert advise(costs, 70, 0.5, "abc").best.ranks == (0,)
    assert "without b and c" in advise(costs, 70, 0.5, "abc").words


@given(st.lists(_cost, min_size=1, max_size=5), st.integers(10, 60), st.floats(0, 3))
def test_following_advice_is_never_slower_than_the_fastest_alone_by_more_than_what_is_worth_saying(
    costs: list[Cost], total: int, communication_s: float
) -> None:
    advice = advise(costs, total, communication_s, [str(rank) for rank in range(len(costs))])
    alone = min(cost.seconds(total) for cost in costs)
    assert advice.best.seconds <= alone * 1.05
    assert advice.gain >= 1


@pytest.mark.parametrize(
    "costs",
    [
        [Cost(per_sample_s=0.0)] * 3,
        [Cost(per_sample_s=1e-300), Cost(per_sample_s=1e-30), Cost(per_step_s=1e6, per_sample_s=1e-18)],
        [Cost(per_step_s=1e8, per_sample_s=1e-9), Cost(per_step_s=1.0, per_sample_s=1e-12, cap=10**15)],
    ],
)
def test_costs_that_a_float_cannot_tell_apart_are_no_endless_work(costs: list[Cost]) -> None:
    """They are learnt from what a training wrote, which may be anything."""
    shares = split(costs, 10**18, [Bounds()] * len(costs))
    assert len(shares) == len(costs)
    assert all(share >= 1 for share in shares)


def test_advice_about_steps_that_take_no_time_is_words() -> None:
    found = advise([Cost(per_sample_s=0.0), Cost(per_step_s=1.0)], 10, 0.0, ["gpu1", "gpu2"])
    assert "without gpu2" in found.words
    assert found.gain > 1
