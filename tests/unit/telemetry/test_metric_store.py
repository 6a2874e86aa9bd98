"""The metric store: exact points, bins at every zoom, limits, and nothing lost or doubled by a crash."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.rig.damage import garbage_in_page_of
from tests.rig.stores import in_metric_store
from ugro.kernel.support.errors import Damaged
from ugro.kernel.telemetry.collector import Collector
from ugro.kernel.telemetry.curves import CHUNK, Curve, Points, SeriesKey, Wanted
from ugro.kernel.telemetry.metricstore import Batch, Limits, MetricStore, Place, Source, job_owner, node_owner

LOSS = SeriesKey("job/1", 1, 0, "loss")
SOURCE = Source("job/1", 1, "output/metrics.jsonl")
DAY_S = 86400


def points(steps: Sequence[int], value: Callable[[int], float] = float) -> Points:
    return Points(list(steps), [1_700_000_000_000 + step for step in steps], [value(step) for step in steps])


async def append_in_pieces(store: MetricStore, key: SeriesKey, whole: Points, sizes: Sequence[int]) -> None:
    begin, turn = 0, 0
    while begin < len(whole):
        size = sizes[turn % len(sizes)]
        await store.append({key: whole.cut(begin, begin + size)})
        begin, turn = begin + size, turn + 1


@pytest.mark.parametrize("sizes", [(1, 3, 50), (700,), (3 * CHUNK + 5,)])
def test_every_point_comes_back_whatever_the_pieces_it_came_in(tmp_path: Path, sizes: Sequence[int]) -> None:
    odd = {5: math.nan, 6: math.inf, 7: -math.inf}
    count = 900 if sizes[0] == 1 else 3 * CHUNK
    whole = points(range(count), lambda step: odd.get(step, math.sin(step)))

    async def work(store: MetricStore) -> None:
        await append_in_pieces(store, LOSS, whole, sizes)
        for is_sealed in (False, True):
            found = (await store.points(Wanted(("job/1",))))[LOSS]
            assert (found.steps, found.times_ms) == (whole.steps, whole.times_ms), is_sealed
            assert list(map(repr, found.values)) == list(map(repr, whole.values))
            await store.seal("job/1")

    in_metric_store(tmp_path, work)


def test_steps_in_any_order_and_repeated_ones_are_all_kept(tmp_path: Path) -> None:
    steps = [*range(0, 6000), *range(1000, 3000), *range(9000, 4000, -1)]
    random.Random(3).shuffle(steps)

    async def work(store: MetricStore) -> None:
        await append_in_pieces(store, LOSS, points(steps), (900,))
        assert (await store.points(Wanted(("job/1",))))[LOSS].steps == sorted(steps)
        [curve] = await store.curves(Wanted(("job/1",), bins=64))
        assert sum(curve.counts) == len(steps)
        assert curve.steps == sorted(curve.steps)

    in_metric_store(tmp_path, work)


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize(
    ("first", "last", "bins"), [(None, None, 100), (None, None, 2000), (7000, 9000, 500), (0, 99, 50)]
)
def test_bins_are_those_of_the_points_at_every_zoom(
    tmp_path: Path, first: int | None, last: int | None, bins: int, is_sealed: bool
) -> None:
    count = 3 * CHUNK + 100
    chance = random.Random(1)
    values = [chance.gauss(0, 1) for _ in range(count)]

    async def work(store: MetricStore) -> None:
        await append_in_pieces(store, LOSS, points(range(count), values.__getitem__), (1000,))
        if is_sealed:
            await store.seal("job/1")
        [curve] = await store.curves(Wanted(("job/1",), first_step=first, last_step=last, bins=bins))
        low, high = first or 0, count - 1 if last is None else last
        assert len(curve.steps) <= bins + 2
        assert len(curve.steps) >= min(bins, high - low + 1) // 2 - 1
        for step, least, most, mean, number in zip(
            curve.steps, curve.lows, curve.highs, curve.means, curve.counts, strict=True
        ):
            inside = values[max(0, step) : step + curve.width]
            assert (least, most, number) == (min(inside), max(inside), len(inside))
            assert mean == pytest.approx(sum(inside) / len(inside))
        assert curve.steps[0] <= low
        assert curve.steps[-1] + curve.width > high

    in_metric_store(tmp_path, work)


def test_what_is_not_finite_is_counted_and_spoils_no_bin(tmp_path: Path) -> None:
    async def work(store: MetricStore) -> None:
        values = [1.0, math.nan, 3.0, math.inf, math.nan, math.nan]
        await store.append({LOSS: points(range(6), values.__getitem__)})
        [curve] = await store.curves(Wanted(("job/1",), bins=6))
        assert (curve.width, curve.odd, curve.counts) == (1, [0, 1, 0, 1, 1, 1], [1, 0, 1, 0, 0, 0])
        assert list(curve.means) == [1.0, None, 3.0, None, None, None]
        json.dumps([curve.lows, curve.highs, curve.means], allow_nan=False)
        [key] = await store.keys(Wanted(("job/1",)))
        assert (key.count, key.last_step, key.last_value) == (6, 5, 3.0)

    in_metric_store(tmp_path, work)


def test_attempts_ranks_and_keys_are_curves_of_their_own(tmp_path: Path) -> None:
    keys = [SeriesKey("job/1", attempt, rank, key) for attempt in (1, 2) for rank in (0, 1) for key in ("loss", "lr")]

    async def work(store: MetricStore) -> None:
        await store.append({key: points([1, 2]) for key in [*keys, SeriesKey("job/2", 1, 0, "loss")]})

        async def found(**fields: int) -> set[SeriesKey]:
            curves = await store.curves(Wanted(("job/1", "job/2"), ("loss",), **fields))
            return {SeriesKey(one.owner, one.attempt, one.rank, one.key) for one in curves}

        assert len(await found()) == 5
        assert await found(attempt=2, rank=1) == {SeriesKey("job/1", 2, 1, "loss")}
        assert len(await store.keys(Wanted(("job/1",)))) == 8

    in_metric_store(tmp_path, work)


def test_curves_of_one_question_are_binned_alike(tmp_path: Path) -> None:
    async def work(store: MetricStore) -> None:
        for job, count in ((1, 100), (2, 50_000), (3, 7)):
            await store.append({SeriesKey(job_owner(job), 1, 0, "loss"): points(range(count))})
            await store.seal(job_owner(job))
        curves = await store.curves(Wanted(("job/1", "job/2", "job/3"), bins=100))
        assert {curve.width for curve in curves} == {512}
        assert [curve.counts for curve in curves if curve.owner != "job/2"] == [[100], [7]]

    in_metric_store(tmp_path, work)


def test_a_curve_takes_few_bytes(tmp_path: Path) -> None:
    chance = random.Random(2)

    async def work(store: MetricStore) -> None:
        count = 20 * CHUNK
        noisy = points(range(count), lambda step: 2 * math.exp(-step / count) + chance.gauss(0, 0.05))
        noisy.times_ms = [1_700_000_000_000 + 50 * step + chance.randrange(10) for step in range(count)]
        await store.append({LOSS: noisy})
        await store.seal("job/1")
        assert await store.size_bytes() / count < 10

    in_metric_store(tmp_path, work)


def test_a_node_keeps_its_last_day_and_a_job_is_forgotten_as_a_whole(tmp_path: Path) -> None:
    now = 1_700_000_000

    def at(seconds: Sequence[int]) -> Points:
        return Points(list(seconds), [second * 1000 for second in seconds], [1.0] * len(seconds))

    async def work(store: MetricStore) -> None:
        node = SeriesKey(node_owner("gpu1"), 0, 0, "score")
        await store.append({node: at(range(now - 3 * DAY_S, now, 5))})
        await store.append({SeriesKey(node_owner("gone"), 0, 0, "score"): at([now - 2 * DAY_S])})
        await store.take(Batch({SeriesKey("job/1", 1, 0, "loss"): at([now - 400 * DAY_S])}, places={SOURCE: Place(70)}))
        await store.append({SeriesKey("job/2", 1, 0, "loss"): at([now - 300 * DAY_S])})
        assert await store.keep_within(Limits(), None) == [], "while the clock is not believed, nothing is too old"
        assert sorted(await store.keep_within(Limits(), now)) == ["job/1", "node/gone"]
        [curve] = await store.curves(Wanted((node.owner,), bins=100))
        assert DAY_S / 5 <= curve.count <= DAY_S / 5 + CHUNK
        assert sum(curve.counts) == curve.count
        assert await store.curves(Wanted(("job/1", "node/gone"))) == []
        assert await store.places("job/1") == {SOURCE: Place(70)}  # its file is not read into here again
        assert len(await store.curves(Wanted(("job/2",)))) == 1

    in_metric_store(tmp_path, work)


def test_when_there_is_too_much_the_oldest_jobs_keep_only_their_summaries(tmp_path: Path) -> None:
    chance = random.Random(4)

    async def work(store: MetricStore) -> None:
        for job in range(6):
            some = points(range(2 * CHUNK), lambda _: chance.random())
            some.times_ms = [time_ms + job * 10**9 for time_ms in some.times_ms]
            await store.append({SeriesKey(job_owner(job), 1, 0, "loss"): some})
        size = await store.size_bytes()
        dropped = await store.keep_within(Limits(bytes=size // 2), 1_700_000_000)
        assert dropped == ["job/0", "job/1", "job/2", "job/3"][: len(dropped)]
        assert 2 <= len(dropped) <= 4
        assert await store.size_bytes() <= size // 2
        curves = await store.curves(Wanted(tuple(job_owner(job) for job in range(6)), bins=100))
        assert [sum(curve.counts) for curve in curves] == [2 * CHUNK] * 6
        [zoomed] = await store.curves(Wanted(("job/0",), first_step=10, last_step=50, bins=100))
        assert zoomed.counts
        assert await store.keep_within(Limits(bytes=size // 2), 1_700_000_000) == []

    in_metric_store(tmp_path, work)


# --- from the files ------------------------------------------------------------------------------------------------


def write(file: Path, steps: Sequence[int], *, rank: int = 0, mode: str = "a") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open(mode) as lines:
        lines.writelines(json.dumps({"step": at, "time": at, "rank": rank, "loss": float(at)}) + "\n" for at in steps)


async def steps_of(store: MetricStore, **which: int) -> list[int]:
    found = await store.points(Wanted(("job/7",), ("loss",), **which))
    return [step for some in found.values() for step in some.steps]


def test_files_of_all_nodes_and_attempts_are_read_from_where_they_were(tmp_path: Path) -> None:
    home = tmp_path / "jobs" / "7"
    first, other = home / "attempt_1/output/metrics.jsonl", home / "attempt_1/nodes/gpu2/metrics.rank1.jsonl"

    async def work(store: MetricStore) -> None:
        collector = Collector(tmp_path / "jobs", store, looking_share=math.inf)
        assert await collector.collect(7) == 0
        write(first, [1, 2])
        write(other, [5], rank=1)
        with first.open("a") as half:
            half.write('{"step": 3, "lo')
        assert await collector.collect(7) == 3
        with first.open("a") as half:
            half.write('ss": 3.0}\nnonsense\n')
        write(home / "attempt_2/output/metrics.jsonl", [1])
        (home / "attempt_2/output/notes.jsonl").write_text('{"step": 1, "loss": 1}\n')
        assert await collector.finish(7) == 2
        assert await collector.finish(7) == 0
        assert await steps_of(store, attempt=1, rank=0) == [1, 2, 3]
        assert await steps_of(store, attempt=1, rank=1) == [5]
        assert await steps_of(store, attempt=2) == [1]
        assert collector.jobs() == [7]

    in_metric_store(tmp_path, work)


def test_files_of_many_ranks_are_taken_in_together_and_only_those_that_have_grown(tmp_path: Path) -> None:
    folder = tmp_path / "jobs/7/attempt_1/output"

    async def work(store: MetricStore) -> None:
        told: list[frozenset[str]] = []
        store.listen(told.append)
        collector = Collector(tmp_path / "jobs", store, looking_share=math.inf)
        for rank in range(64):
            write(folder / f"metrics.{rank}.jsonl", [1, 2], rank=rank)
        write(folder / "metrics.jsonl", [0], rank=5)  # of a curve that another file has more of
        assert await collector.collect(7) == 129
        assert len(told) == 1, "one transaction"
        assert await collector.collect(7) == 0
        write(folder / "metrics.5.jsonl", [3], rank=5)
        assert await collector.collect(7) == 1
        assert len(told) == 2
        assert [await steps_of(store, rank=rank) for rank in (4, 5, 63)] == [[1, 2], [0, 1, 2, 3], [1, 2]]

    in_metric_store(tmp_path, work)


def test_a_large_file_among_small_ones_is_read_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "jobs/7/attempt_1/output"
    counts = [3, 90_000, 3]  # the second takes more than one transaction

    async def work(store: MetricStore) -> None:
        told: list[frozenset[str]] = []
        store.listen(told.append)
        for rank, count in enumerate(counts):
            write(folder / f"metrics.{rank}.jsonl", range(count), rank=rank)
        assert await Collector(tmp_path / "jobs", store).collect(7) == sum(counts)
        assert len(told) > 1
        for rank, count in enumerate(counts):
            assert await steps_of(store, rank=rank) == list(range(count))

    in_metric_store(tmp_path, work)


def test_a_file_that_was_written_anew_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "jobs/7/attempt_1"
    file = folder / "output/metrics.jsonl"

    async def work(store: MetricStore) -> None:
        collector = Collector(tmp_path / "jobs", store, looking_share=math.inf)
        write(file, range(100))
        write(folder / "nodes/gpu2/metrics.jsonl", [1, 2], rank=1)
        await collector.collect(7)
        write(file, [500], mode="w")
        await collector.collect(7)
        assert await steps_of(store, rank=0) == [500]
        assert await steps_of(store, rank=1) == [1, 2]

    in_metric_store(tmp_path, work)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    write(secret, [1])
    folder = tmp_path / "jobs/7/attempt_1/output"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").symlink_to(secret)
    (tmp_path / "jobs/7/attempt_2").symlink_to(tmp_path)

    async def work(store: MetricStore) -> None:
        assert await Collector(tmp_path / "jobs", store).collect(7) == 0

    in_metric_store(tmp_path, work)


def test_a_damaged_store_is_put_aside_and_its_curves_are_made_again(tmp_path: Path) -> None:
    write(tmp_path / "jobs/7/attempt_1/output/metrics.jsonl", [1, 2, 3])
    (tmp_path / "metrics.db").write_bytes(b"this is no database" * 1000)
    (tmp_path / "metrics.db.damaged-20200101T000000Z").write_bytes(b"an older one")

    async def work(store: MetricStore) -> None:
        await Collector(tmp_path / "jobs", store).finish(7)
        assert await steps_of(store) == [1, 2, 3]

    in_metric_store(tmp_path, work)
    [aside] = tmp_path.glob("metrics.db.damaged-*")
    assert aside.read_bytes().startswith(b"this is no database")


def test_a_store_whose_damage_is_met_in_use_is_put_aside_and_the_next_call_works(tmp_path: Path) -> None:
    write(tmp_path / "jobs/7/attempt_1/output/metrics.jsonl", [1, 2, 3])
    collector_of = partial(Collector, tmp_path / "jobs")

    async def fill(store: MetricStore) -> None:
        await collector_of(store).finish(7)

    async def work(store: MetricStore) -> None:
        garbage_in_page_of("series")(tmp_path / "metrics.db")
        calls = [steps_of(store), steps_of(store), store.seal("job/7")]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [Damaged, Damaged, Damaged]
        await collector_of(store).finish(7)
        assert await steps_of(store) == [1, 2, 3]

    in_metric_store(tmp_path, fill)
    in_metric_store(tmp_path, work)
    assert len([path for path in tmp_path.glob("metrics.db.damaged-*") if path.name.endswith("Z")]) == 1


_COLLECT = """
import asyncio, sys
from pathlib import Path
from ugro.kernel.telemetry.collector import Collector
from ugro.kernel.telemetry.metricstore import MetricStore

async def main(folder):
    store = MetricStore(folder / "metrics.db")
    await store.open()
    collector = Collector(folder / "jobs", store)
    print("open", flush=True)
    while True:
        await collector.collect(7)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.proof
def test_a_collector_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    file = tmp_path / "jobs/7/attempt_1/output/metrics.jsonl"
    chance = random.Random(5)
    written = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", _COLLECT, str(tmp_path)], stdout=subprocess.PIPE, env=dict(os.environ)
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        deadline = time.monotonic() + chance.uniform(0.05, 0.4)
        while time.monotonic() < deadline:
            count = chance.randrange(1, 400)
            write(file, range(written, written + count))
            written += count
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()

    async def work(store: MetricStore) -> None:
        await Collector(tmp_path / "jobs", store).finish(7)
        assert await steps_of(store) == list(range(written))
        [curve] = await store.curves(Wanted(("job/7",), ("loss",), bins=100))
        assert _total(curve) == (written, written)

    in_metric_store(tmp_path, work)


def _total(curve: Curve) -> tuple[int, int]:
    return sum(curve.counts), curve.count
