"""The advice: a plain loop for little work, more machines for much, and the bound in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.batches.model import Bound, Place, Sample
from ugro.features.batches.rules import estimate, predict

CORE = Place("one core", 1)
HERE = Place("this machine", 4, start_s=0.3, slot_item_s=2e-6, driver_item_s=1e-6, is_here=True)
NODES = Place("3 nodes", 24, start_s=12.0, slot_item_s=2e-6, driver_item_s=1e-6, bytes_per_s=125e6, is_assumed=True)


def sample(items: int, cost_s: float, size: float = 100.0) -> Sample:
    return Sample(items, (cost_s,) * 10, size, 0.0)


@pytest.mark.parametrize(
    ("items", "cost_s", "place"),
    [
        (100_000, 1e-6, "one core"),
        (100_000, 18e-6, "one core"),
        (100_000, 1e-3, "3 nodes"),
        (10_000, 1e-3, "this machine"),
        (1, 3600.0, "one core"),
    ],
)
def test_the_place_fits_the_work(items: int, cost_s: float, place: str) -> None:
    assert estimate(sample(items, cost_s), [CORE, HERE, NODES]).recommended.place.name == place


def test_little_work_is_done_here() -> None:
    found = estimate(sample(100_000, 15e-6), [CORE, HERE])
    work = "1.50 s of work in 100,000 items"
    assert found.reason == f"{work}: do it here, in a plain loop; this machine would save only 775 ms"


def test_the_reason_names_the_gain_and_the_bound() -> None:
    data = estimate(sample(3000, 1.0, 10e6), [CORE, HERE, NODES])
    assert data.reason == (
        "50m of work in 3,000 items: 11.9 × on 3 nodes; the data's 27.9 GiB over 1 Gbit/s are the bound"
    )
    longest = Sample(48, (*[1.0] * 47, 100.0), 1.0, 1.0)
    assert "the longest item, 1m40s, is the bound" in estimate(longest, [CORE, HERE]).reason


def test_a_place_that_is_slow_to_start_is_named() -> None:
    assert "3 nodes needs 12.0 s to start" in estimate(sample(10, 0.1), [CORE, NODES]).reason


def test_one_core_takes_as_long_as_its_work() -> None:
    assert predict(sample(1000, 0.01), CORE).seconds == pytest.approx(10.0)


def test_items_that_cost_nothing_are_bound_by_the_driver() -> None:
    assert predict(sample(10**6, 1e-9), NODES).bound is Bound.DRIVER


@given(
    items=st.integers(1, 10**9),
    costs=st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=20),
    slots=st.integers(1, 1000),
)
def test_more_slots_never_make_it_slower(items: int, costs: list[float], slots: int) -> None:
    one = Sample(items, tuple(costs), 10.0, 10.0)
    few, more = (predict(one, Place("x", count, slot_item_s=1e-6)) for count in (slots + 1, slots + 2))
    assert more.seconds <= few.seconds * 1.0000001
    assert estimate(one, [CORE, HERE, NODES]).reason


def test_an_uneven_sample_says_that_it_is_uncertain() -> None:
    assert Sample(1000, (1.0,) * 10, 0, 0).error == 0
    assert Sample(1000, (*[0.01] * 9, 1.0), 0, 0).error > 0.5
