"""The ladder of compressions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import UsageError
from ugro.train.rules.sync import Measured, Method, choose, wished

MB = 10**6


def test_an_exchange_that_hardly_costs_anything_stays_as_it_is() -> None:
    choice = choose(Measured(2, 100 * MB, MB, own_s=1.0, exchange_s=0.05))
    assert choice.method is Method.NONE
    assert "5 % of a step" in choice.reason


def test_half_precision_where_that_is_nearly_as_fast_as_low_rank() -> None:
    assert choose(Measured(2, 100 * MB, MB, own_s=1.0, exchange_s=0.4)).method is Method.FP16


def test_low_rank_where_the_network_takes_most_of_the_step() -> None:
    choice = choose(Measured(2, 100 * MB, MB, own_s=0.1, exchange_s=0.9))
    assert choice.method is Method.POWERSGD
    assert choice.step_s == pytest.approx(0.19)


def test_a_model_of_small_matrices_gains_nothing_from_low_rank() -> None:
    assert choose(Measured(2, 100 * MB, 90 * MB, own_s=0.1, exchange_s=0.9)).method is Method.FP16


def test_other_names_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown compression"):
        wished("zip")


@given(st.integers(2, 9), st.integers(1, 10**10), st.floats(0, 1), st.floats(1e-6, 10), st.floats(0, 10))
def test_a_choice_is_never_predicted_to_be_slower(
    ranks: int, sent: int, part: float, own_s: float, exchange_s: float
) -> None:
    choice = choose(Measured(ranks, sent, int(part * sent), own_s, exchange_s))
    assert choice.step_s <= own_s + exchange_s
    assert choice.reason
