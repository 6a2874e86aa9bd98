"""What runs have measured, and what a few of them say about the rest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ugro.features.experiments.rules.measure import (
    Figures,
    Moment,
    Run,
    bands,
    estimate,
    figures,
    joined,
    moments,
    rows,
)
from ugro.features.experiments.rules.page import gain, number, spread
from ugro.features.training.model import EpochEnergy, JobEnergy
from ugro.kernel.telemetry.records import AttemptSteps, StepRecord

ZERO = (0.0, 0.0)


def step(number: int, own: tuple[float, float] = (1.0, 3.0), step_s: float = 4.0) -> StepRecord:
    """Two ranks, ten steps in an epoch; a step ends at its number times its length."""
    waiting = (max(own) - own[0], max(own) - own[1])
    end_s = 1000.0 + step_s * (number + 1)
    return StepRecord(
        number, number // 10, 8, 1 / (number + 1), step_s, (4, 4), own, ZERO, ZERO, ZERO, waiting, ZERO, ZERO, end_s
    )


def attempt(*steps: StepRecord, number: int = 1) -> AttemptSteps:
    return AttemptSteps(number, ("a", "b"), "cpu", "off", 100, steps)


def run(variant: str, seed: int, speed: float, number: int = 1, model: str = "gpt") -> Run:
    curve = tuple(Moment(8 * at, at / speed, 10 / at + seed) for at in range(1, 41))
    return Run(number, model, variant, seed, "complete", number, figures=Figures(speed, waiting=0.5), curve=curve)


def test_figures_are_of_the_steps_after_settling() -> None:
    slow = [step(number, own=(9.0, 9.0)) for number in range(8)]
    found = figures([attempt(*slow, *(step(number) for number in range(8, 40)))], None)
    assert found.samples_per_s == pytest.approx(8 / 4)
    assert found.imbalance == pytest.approx(3 / 2)
    assert found.load_variance == pytest.approx(1 / 2)  # 1 and 3: the deviation is 1, the mean 2
    assert found.waiting == pytest.approx(2 / 8)  # the first rank waits 2 of 4 seconds
    assert found.epoch_s == pytest.approx(40)
    assert found.loss == pytest.approx(sum(1 / (number + 1) for number in range(32, 40)) / 8)
    assert (found.steps, found.shares, found.nodes) == (40, (4, 4), ("a", "b"))
    assert (found.epoch_j, found.epoch_cost) == (None, None)


def test_a_record_of_a_round_counts_for_all_of_its_steps() -> None:
    rounds = [replace(step(number), step_s=step_s) for number, step_s in ((1, 4.0), (9, 2.0), (39, 1.0))]
    found = figures([attempt(*rounds)], None)
    assert found.samples_per_s == pytest.approx(8 * 38 / (8 * 2 + 30 * 1))
    assert found.steps == 40
    assert [one.samples for one in moments([attempt(*rounds)])] == [16, 80, 320]


def test_the_first_epoch_counts_if_there_is_no_other_and_nothing_is_made_up_without_records() -> None:
    assert figures([attempt(*(step(number) for number in range(10)))], None).epoch_s == pytest.approx(40)
    assert figures([], None) == Figures()
    timeless = [replace(step(number), time_s=0.0) for number in range(20)]
    assert figures([attempt(*timeless)], None).epoch_s is None
    assert moments([attempt(*timeless)]) == []


def test_energy_and_cost_are_of_an_epoch() -> None:
    epochs = (EpochEnergy(0, 40, 300.0), EpochEnergy(1, 40, 100.0))
    energy = JobEnergy(500.0, 0.1, 1, 1.0, "", cost=0.05, currency="EUR", epochs=epochs)
    found = figures([attempt(*(step(number) for number in range(20)))], energy)
    assert (found.epoch_j, found.currency) == (200.0, "EUR")
    assert found.epoch_cost == pytest.approx(0.02)


def test_an_attempt_that_goes_back_replaces_what_it_repeats() -> None:
    first = attempt(*(step(number) for number in range(12)))
    second = attempt(*(step(number) for number in range(10, 20)), number=2)
    assert [one.step for one in joined([second, first])] == list(range(20))
    assert moments([first, second])[-1].samples == 160


def test_losses_that_are_no_numbers_are_left_out() -> None:
    broken = [replace(step(number), loss=math.nan if number % 2 else 1.0) for number in range(10)]
    assert figures([attempt(*broken)], None).loss == 1.0
    assert len(moments([attempt(*broken)])) == 5


def test_an_interval_is_students_and_one_value_has_none() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / math.sqrt(3))
    alone = estimate([5.0])
    assert alone is not None
    assert (alone.mean, alone.half, alone.low, alone.high) == (5.0, None, 5.0, 5.0)
    assert estimate([]) is None
    many = estimate([float(number % 2) for number in range(1000)])
    assert many is not None
    assert many.half == pytest.approx(1.96 * 0.50025 / math.sqrt(1000), rel=1e-3)


def test_ratios_are_of_runs_with_the_same_seed() -> None:
    runs = [run("uniform", 1, 10, 1), run("adaptive", 1, 20, 2), run("uniform", 2, 20, 3), run("adaptive", 2, 44, 4)]
    uniform, adaptive = rows(runs)
    assert (uniform.ratio, uniform.against, gain(uniform)) == (None, None, "1")
    assert adaptive.against == "uniform"
    assert adaptive.ratio is not None
    assert adaptive.ratio.mean == pytest.approx((2 + 2.2) / 2)
    assert gain(adaptive).startswith("× 2.1 ± 1.3")
    assert set(adaptive.values) == {"samples_per_s", "waiting"}


def test_runs_that_failed_or_run_yet_are_counted_and_not_measured() -> None:
    failed = replace(run("uniform", 2, 99), state="failed")
    (row,) = rows([run("uniform", 1, 10), failed])
    assert (row.runs, row.wanted, row.values["samples_per_s"].mean) == (1, 2, 10)


def test_a_curve_has_a_band_over_seeds_and_ends_with_its_shortest() -> None:
    runs = [run("uniform", 1, 10), replace(run("uniform", 3, 10), curve=run("uniform", 3, 10).curve[:20])]
    (band,) = bands(runs, "gpt", lambda one: float(one.samples))
    assert (len(band.xs), band.xs[-1]) == (20, 160)
    assert band.means[-1] == pytest.approx(10 / 20 + 2)
    assert band.lows[-1] < band.means[-1] < band.highs[-1]
    (timed,) = bands(runs[:1], "gpt", lambda one: one.seconds)
    assert timed.xs[-1] == pytest.approx(4.0)
    assert timed.lows == timed.highs == timed.means
    assert bands(runs, "bert", lambda one: one.seconds) == []


def test_numbers_have_three_digits_that_count() -> None:
    assert [number(value) for value in (0.0, 1234.5, 99.4, 1.25, 0.4567, 0.00012)] == [
        "0", "1234", "99.4", "1.25", "0.457", "0.0001",
    ]  # fmt: skip
    one = estimate([100.0, 101.0, 102.0])
    assert one is not None
    assert spread(one) == "101.0 ± 2.5"
