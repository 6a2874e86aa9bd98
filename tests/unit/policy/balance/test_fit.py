"""What windows of steps say about a rank."""

from __future__ import annotations

import pytest

from ugro.train.rules.shares import RankFit, Window


def test_two_windows_of_equal_weight_that_disagree_both_have_a_say() -> None:
    fit = RankFit(windows=[Window.of(8, [1.0] * 10), Window.of(8, [10.0] * 7)])
    assert 8 * fit.cost().per_sample_s == pytest.approx(5.5)
