"""What jobs came to, without their curves: the same as the points say, whatever the pieces they came in."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rig.stores import in_metric_store
from ugro.kernel.telemetry.curves import Points, SeriesKey, Wanted
from ugro.kernel.telemetry.metricstore import Limits, MetricStore
from ugro.kernel.telemetry.model import Figure

LOSS = SeriesKey("job/1", 1, 0, "loss")


def points(values: Sequence[float], first: int = 0) -> Points:
    steps = list(range(first, first + len(values)))
    return Points(steps, [1_900_000_000_000 + step for step in steps], list(values))


@pytest.mark.parametrize("count", [60, 9000])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_last_least_and_largest_are_those_of_the_points(tmp_path: Path, count: int, is_sealed: bool) -> None:
    chance = random.Random(count)
    values = [chance.gauss(0, 1) for _ in range(count)]
    values[5], values[7] = math.nan, math.inf

    async def work(store: MetricStore) -> None:
        for begin in range(0, count, count // 3):
            await store.append({LOSS: points(values[begin : begin + count // 3], begin)})
        if is_sealed:
            await store.seal("job/1")
        finite = [value for value in values if math.isfinite(value)]
        steps = (values.index(min(finite)), values.index(max(finite)))
        expected = Figure(values[-1], min(finite), max(finite), count - 1, count, *steps)
        assert await store.figures([1]) == {1: {"loss": expected}}
        assert await store.figures() == await store.figures([1])

    in_metric_store(tmp_path, work)


def test_the_newest_attempt_and_the_first_rank_count_and_steps_of_ranks_do_not(tmp_path: Path) -> None:
    async def work(store: MetricStore) -> None:
        curves = {(1, 0): 9.0, (2, 1): 8.0, (2, 0): 7.0}
        await store.append({SeriesKey("job/1", *place, "loss"): points([value]) for place, value in curves.items()})
        await store.append({SeriesKey("job/1", 1, 0, "profile/step_s"): points([1.0])})
        await store.append({SeriesKey("node/a", 0, 0, "cpu"): points([1.0])})
        await store.append({SeriesKey("job/2", 1, 0, "loss"): points([math.nan])})
        found = await store.figures()
        assert {job: set(keys) for job, keys in found.items()} == {1: {"loss"}, 2: {"loss"}}
        assert found[1]["loss"].last == 7.0
        assert found[2]["loss"] == Figure(None, None, None, 0, 1, odd_step=0)

    in_metric_store(tmp_path, work)


def test_last_is_the_last_finite_value_and_the_step_of_the_divergence_is_known(tmp_path: Path) -> None:
    async def work(store: MetricStore) -> None:
        await store.append({LOSS: points([3.0, 1.0, 2.0])})
        await store.append({LOSS: points([math.nan], 3)})
        await store.append({LOSS: points([math.inf, math.nan], 4)})
        [found] = (await store.figures())[1].values()
        assert found == Figure(2.0, 1.0, 3.0, 5, 6, 1, 0, odd_step=3)
        [key] = await store.keys(Wanted(("job/1",)))
        assert key.last_value == found.last
        await store.append({LOSS: points([0.5], 6)})
        [found] = (await store.figures())[1].values()
        assert (found.last, found.least_step, found.odd_step) == (0.5, 6, None)

    in_metric_store(tmp_path, work)


def test_figures_up_to_an_attempt_leave_out_later_ones(tmp_path: Path) -> None:
    async def work(store: MetricStore) -> None:
        await store.append({SeriesKey("job/1", attempt, 0, "loss"): points([float(attempt)]) for attempt in (1, 2)})
        assert (await store.figures([1]))[1]["loss"].last == 2.0
        assert (await store.figures([1], attempt=1))[1]["loss"].last == 1.0

    in_metric_store(tmp_path, work)


def test_who_lost_curves_is_told_as_who_got_more(tmp_path: Path) -> None:
    async def work(store: MetricStore) -> None:
        told: list[frozenset[str]] = []
        store.listen(told.append)
        await store.append({LOSS: points([1.0])})
        await store.keep_within(Limits(), 4e9)
        assert told == [frozenset({"job/1"})] * 2
        assert await store.figures() == {}

    in_metric_store(tmp_path, work)
