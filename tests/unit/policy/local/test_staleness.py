"""What late updates count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.core.errors import UsageError
from ugro.policy.local.staleness import Update, judge, patience_s
from ugro.policy.local.sync import Outer, Sync, SyncMode, chosen, outer, sync_mode


def test_updates_count_by_their_samples() -> None:
    assert judge([Update(30), Update(10)], 0).weights == (0.75, 0.25)


def test_an_absent_rank_counts_nothing_and_the_others_all() -> None:
    assert judge([Update(30), None, Update(10)], 1).weights == (0.75, 0, 0.25)


def test_a_late_update_counts_less() -> None:
    verdict = judge([Update(10), Update(20, delay=1)], 1)
    assert verdict.weights == (0.5, 0.5)
    assert (verdict.late, verdict.rejected) == ((1,), ())


def test_an_update_that_is_too_late_is_rejected() -> None:
    verdict = judge([Update(10), Update(20, delay=2)], 1)
    assert verdict.rejected == (1,)
    assert verdict.weights == (1, 0)


def test_if_nothing_counts_all_weights_are_zero() -> None:
    assert judge([None, Update(20, delay=3)], 2).weights == (0, 0)
    assert judge([Update(0.0), Update(0.0, delay=5)], 2) == judge([Update(0.0), Update(0.0)], 2)


@given(
    st.lists(st.none() | st.builds(Update, st.floats(0, 1e6), st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(0, 4),
)
def test_weights_are_an_average_of_what_is_in_time(updates: list[Update | None], most: int) -> None:
    verdict = judge(updates, most)
    assert sum(verdict.weights) == pytest.approx(1) or not any(verdict.weights)
    for weight, update in zip(verdict.weights, updates, strict=True):
        assert weight == 0 or (update is not None and update.delay <= most and update.mass > 0)


def test_patience_follows_the_round() -> None:
    assert patience_s(20) == 10
    assert patience_s(0.01) == 0.5


def test_a_script_overrides_its_surroundings() -> None:
    found = chosen(Sync(SyncMode.STEP, 30.0), {"sync": "local", "max_staleness": 2, "outer": "nesterov"})
    assert found == Sync(SyncMode.LOCAL, 30.0, 2, Outer.NESTEROV)
    assert chosen(found, {}) is found


@pytest.mark.parametrize("wrong", [{"round_s": 0.0}, {"round_s": float("nan")}, {"max_staleness": -1}])
def test_values_that_make_no_rounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sync(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown sync mode"):
        sync_mode("never")
    with pytest.raises(UsageError, match="unknown outer"):
        outer("adam")
