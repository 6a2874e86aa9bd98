"""Which curves make a job's headline, and its words."""

from __future__ import annotations

import pytest

from ugro.features.training import rules_headline as headline
from ugro.features.training.model import DeviceUse, Headline, JobEnergy, JobProgress, LossLine, Speed
from ugro.kernel.links.model import Gpu


def test_the_metric_with_the_most_records_tells_of_steps() -> None:
    assert headline.step_name([("loss", 10), ("val_loss", 2), ("plan/predicted_s", 90)]) == "loss"
    assert headline.step_name([("loss", 10), ("profile/step_s", 3)]) == "profile/step_s"
    assert headline.step_name([("plan/predicted_s", 3)]) is None


def test_the_small_curve_has_a_gap_where_steps_are_missing() -> None:
    found = headline.loss_line("loss", [0, 1, 2, 3, 90, 91], [5.0, 4.0, None, 3.0, 2.0, 1.0], 0.9)
    assert found == LossLine("loss", 0.9, None, (5.0, 4.0, None, 3.0, None, 2.0, 0.9))


def test_a_loss_that_is_no_number_any_more_is_not_shown_as_the_last_good_one() -> None:
    assert headline.loss_line("loss", [7, 8], [0.5, None], 0.5) == LossLine("loss", None, None, (0.5, None))


def test_the_speed_is_of_now_while_it_runs_and_of_all_afterwards() -> None:
    samples, seconds = [10.0] * 10, [1.0] * 5 + [0.5] * 5
    assert headline.speed_of(samples, seconds, is_final=False) == Speed(20, "samples/s")
    whole = headline.speed_of(samples, seconds, is_final=True)
    assert whole is not None
    assert whole.value == pytest.approx(10 / 0.75)
    assert headline.speed_of([None], [None], is_final=False) is None
    assert headline.logged_speed("tokens_per_s", [None, 5.0], is_final=False) == Speed(5, "tokens/s")


def test_computing_is_the_own_time_without_waiting_for_data() -> None:
    found = headline.computing([1.0], [[0.75], [0.25]], [[0.25], [0.25]], is_final=False)
    assert found is not None
    assert found.computing == pytest.approx(0.25)
    assert headline.computing([0.0], [[0.5]], [], is_final=False) is None


def test_of_the_gpus_those_count_that_can_be_read() -> None:
    good = Gpu(0, "a", "x", memory_total_bytes=100, memory_used_bytes=50, use_ratio=0.9)
    idle = Gpu(1, "b", "x", memory_total_bytes=100, memory_used_bytes=0, use_ratio=0.1)
    lost = Gpu(2, "c", "x", error="fell off the bus")
    assert headline.gpu_use([good, idle, lost]) == DeviceUse(3, 0.5, 0.25)
    assert headline.gpu_use([lost]) is None


def test_one_line_has_all_that_is_known_and_nothing_else() -> None:
    running = Headline(
        1, 1, False, 60.0, "", JobProgress("step 450 of 1,000", "1m15s left", 450, 1000, 75.0),
        LossLine("loss", 0.41234, 0.4), Speed(123456.5, "samples/s"), DeviceUse(4, 0.871, 0.71),
    )  # fmt: skip
    assert headline.in_one_line(running) == (
        "step 450 of 1,000 (45 %) · 1m15s left · loss 0.4123 · 123,456 samples/s · GPU use 87 %, memory 71 %"
    )
    ended = Headline(1, 1, True, 90.0, "", None, LossLine("loss", None, 0.4), None, DeviceUse(computing=0.5))
    assert headline.in_one_line(ended) == "took 1m30s · loss not a number (best 0.4) · computing 50 % of the time"
    assert headline.in_one_line(Headline(1, 1, False, 60.0, "")) == ""
    used = JobEnergy(7200.0, 2.0, 1, 0.5, "2.00 Wh, 0.50 EUR (GPUs; measured for 50 % of the time)", 0.5, "EUR")
    assert headline.in_one_line(Headline(1, 1, False, 60.0, "", energy=used)) == "2.00 Wh (0.50 EUR)"


def test_numbers_whose_sum_is_too_large_have_a_mean() -> None:
    """A list of jobs must not fail because of what one of them wrote."""
    huge = [1.7e308] * 3
    logged = headline.logged_speed("throughput", huge, is_final=True)
    measured = headline.speed_of(huge, huge, is_final=False)
    assert logged is not None
    assert measured is not None
    assert (logged.value, measured.value) == pytest.approx((1.7e308, 1.0))
    assert headline.computing(huge, [huge] * 2, [huge] * 2, is_final=True) == DeviceUse(computing=0.0)
