"""Batches take about the same time whatever an item costs and however fast a slot is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.batches.rules import Aims, Cost, Sizes, SlotView, share_of, slice_size, takes_another

AIMS = Aims()


def view(
    cost_s: float | None, remaining: int | None = None, share: float = 0.5, item_bytes: int = 0, result_bytes: int = 0
) -> SlotView:
    cost = Cost()
    if cost_s is not None:
        cost.note(10**6, 10**6 * cost_s)
    arguments, results = Sizes(), Sizes()
    arguments.note(1, item_bytes)
    results.note(1, result_bytes)
    return SlotView(cost, share, remaining, arguments, results)


@pytest.mark.parametrize(("cost_s", "items"), [(1e-5, 15_000), (1e-3, 150), (0.1, 1), (60.0, 1)])
def test_a_batch_aims_at_the_same_time_whatever_an_item_costs(cost_s: float, items: int) -> None:
    assert slice_size(view(cost_s), AIMS) == pytest.approx(items, rel=0.01)


def test_the_rest_is_shared_out_by_speed() -> None:
    assert slice_size(view(1e-3, 100), AIMS) == 25
    assert slice_size(view(1e-3, 100, share=0.8), AIMS) == 40


def test_the_last_batches_are_still_worth_their_overhead() -> None:
    assert slice_size(view(1e-5, 1000), AIMS) == pytest.approx(1000, abs=1)


def test_few_items_are_for_all_slots() -> None:
    assert slice_size(view(None, 4), AIMS) == 2


@pytest.mark.parametrize("field", ["item_bytes", "result_bytes"])
def test_bytes_bound_a_batch(field: str) -> None:
    assert slice_size(view(1e-5, **{field: 1 << 20}), AIMS) == 8
    assert slice_size(view(1e-5, **{field: 1 << 30}), AIMS) == 1


def test_a_few_quick_items_do_not_make_the_next_batch_huge() -> None:
    cost = Cost()
    cost.note(2, 2e-6)
    assert slice_size(SlotView(cost, 0.5, None, Sizes(), Sizes()), AIMS) == 64


@given(
    cost_s=st.one_of(st.none(), st.floats(1e-7, 1e4)),
    remaining=st.one_of(st.none(), st.integers(0, 10**9)),
    share=st.floats(0.0, 1.0),
    item_bytes=st.integers(0, 1 << 40),
)
def test_a_batch_has_at_least_one_item_and_is_within_its_bounds(
    cost_s: float | None, remaining: int | None, share: float, item_bytes: int
) -> None:
    size = slice_size(view(cost_s, remaining, share=share, item_bytes=item_bytes), AIMS)
    assert size >= 1
    assert size == 1 or cost_s is None or size * cost_s <= AIMS.batch_s * 1.001
    assert size == 1 or size * item_bytes <= AIMS.most_bytes


def test_costs_follow_what_was_measured_last() -> None:
    cost = Cost()
    cost.note(100, 0.1)
    for _ in range(6):
        cost.note(100, 10.0)
    assert cost.per_item_s == pytest.approx(0.1, rel=0.05)


def test_a_second_batch_waits_only_behind_a_short_one() -> None:
    assert takes_another(None, 0, AIMS)
    assert takes_another(0.15, 1, AIMS)
    assert not takes_another(None, 1, AIMS)
    assert not takes_another(1.0, 1, AIMS)
    assert not takes_another(0.1, 2, AIMS)


def test_a_slow_slot_has_a_small_share() -> None:
    quick, slow, overall = Cost(), Cost(), Cost()
    quick.note(100, 1.0)
    slow.note(100, 4.0)
    overall.note(200, 5.0)
    costs = {1: quick, 2: slow}
    assert share_of(1, costs, overall, 0) == pytest.approx(0.8)
    assert share_of(2, costs, overall, 0) == pytest.approx(0.2)


def test_slots_that_are_starting_get_their_share_of_few_items() -> None:
    assert share_of(1, {1: Cost()}, Cost(), 3) == pytest.approx(0.25)


def test_a_slot_may_take_twice_what_was_expected_and_never_much_longer_than_a_batch() -> None:
    assert AIMS.budget_s(0.1) == pytest.approx(0.2)
    assert AIMS.budget_s(0.0) == AIMS.probe_s
    assert AIMS.budget_s(60.0) == pytest.approx(0.3)
