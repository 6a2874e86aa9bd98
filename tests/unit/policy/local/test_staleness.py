"""What late updates count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import UsageError
from ugro.train.rules.sync import Outer, Sync, SyncMode, Update, chosen, judge, outer, patience_s, sync_mode


def test_updates_count_by_their_samples() -> None:
    assert judge([Update(30), Update(10)], 0).weights == (0.75, 0.25)


def test_an_update_that_is_not_finite_counts_nothing_and_is_rejected() -> None:
    verdict = judge([Update(30), Update(50, is_finite=False), Update(10, delay=1)], 1)
    assert verdict.weights == pytest.approx((30 / 35, 0, 5 / 35))
    assert verdict.rejected == (1,)
    assert judge([Update(30, is_finite=False)], 0).weights == (0.0,)


def test_an_absent_rank_counts_nothing_and_the_others_all() -> None:
    assert judge([Update(30), None, Update(10)], 1).weights == (0.75, 0, 0.25)


def test_a_late_update_counts_less() -> None:
    verdict = judge([Update(10), Update(20, delay=1)], 1)
    assert verdict.weights == (0.5, 0.5)
    assert (verdict.late, verdict.rejected) == ((1,), ())


def test_if_nobody_is_in_time_the_model_moves_less() -> None:
    """Else a rank that is late alone would move it as far as one in time."""
    assert judge([None, Update(20, delay=1)], 1).weights == (0, 0.5)
    assert judge([Update(10, delay=2), Update(20, delay=1)], 2).weights == (0.125, 0.375)
    assert judge([Update(10, delay=3), Update(20)], 2).weights == (0, 1)


def test_an_update_that_is_too_late_is_rejected() -> None:
    verdict = judge([Update(10), Update(20, delay=2)], 1)
    assert verdict.rejected == (1,)
    assert verdict.weights == (1, 0)


def test_if_nothing_counts_all_weights_are_zero() -> None:
    assert judge([None, Update(20, delay=3)], 2).weights == (0, 0)
    assert judge([Update(0.0), Update(0.0, delay=5)], 2) == judge([Update(0.0), Update(0.0)], 2)


MASSES = st.just(0.0) | st.floats(1e-6, 1e6)


@given(
    st.lists(st.none() | st.builds(Update, MASSES, st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(0, 4),
)
def test_weights_are_an_average_of_what_is_in_time(updates: list[Update | None], most: int) -> None:
    verdict = judge(updates, most)
    in_time = [one.delay for one in updates if one is not None and one.mass > 0 and one.delay <= most]
    assert sum(verdict.weights) == pytest.approx(1 / (1 + min(in_time)) if in_time else 0)
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
