"""Latencies in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.services.node.door_records import Histogram, Window

TIMES = st.lists(st.floats(0.001, 3600), min_size=1, max_size=200)


@given(TIMES, st.floats(0.01, 1))
def test_a_quantile_is_within_five_percent_of_a_real_one(times: list[float], share: float) -> None:
    histogram = Histogram()
    for seconds in times:
        histogram.add(seconds)
    exact = sorted(times)[max(0, -int(-share * len(times) // 1) - 1)]
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.05)
    assert histogram.summary()["mean_s"] == pytest.approx(sum(times) / len(times))


def test_a_window_forgets() -> None:
    window = Window(60)
    for now in range(0, 50, 10):
        window.add(1.0, now)
    assert window.whole(50).count == 5
    window.add(9.0, 65)
    assert window.whole(65).count == 5
    assert window.whole(100).count == 1
    assert window.whole(1000).count == 0
    assert window.whole(1000).summary() == {"count": 0, "mean_s": 0.0, "p50_s": 0.0, "p90_s": 0.0, "p99_s": 0.0}


def test_what_takes_for_ever_counts_as_the_longest() -> None:
    histogram = Histogram()
    histogram.add(1e9)
    histogram.add(0.0)
    assert 3600 < histogram.quantile(1.0) < 10_000
    assert histogram.quantile(0.5) < 0.001
