"""The metric store against a row per point in SQLite, on the same points in the same run.

    python -m bench metrics

Ingest is from the run's own file, as a job writes it, to points that last; a comparison is a chart of every run.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.bars import Bar, Row, print_rows
from ugro.kernel.support.codec import dumps
from ugro.kernel.telemetry.collector import Collector
from ugro.kernel.telemetry.curves import Points, SeriesKey, Wanted
from ugro.kernel.telemetry.metricstore import MetricStore, job_owner

_RUNS = 1000
_POINTS = 100_000
_BINS = 200
_FILE_LINES = 50_000
_NAMES = ("loss", "lr", "grad_norm", "samples_per_s", "gpu_use")
# What a row per point is measured with; the time of a comparison grows in proportion to the points.
_ROW_RUNS = 10


def measure(runs: int = _RUNS) -> list[Bar]:
    return asyncio.run(_measure(runs))


async def _measure(runs: int) -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="ugro-bench-") as folder:
        ours = await _ours(Path(folder), runs)
        theirs = _rows(Path(folder))
    points, row_points = runs * _POINTS, _ROW_RUNS * _POINTS
    print_rows(f"{runs:,} runs of {_POINTS:,} points", [ours.compare, ours.zoom])
    print_rows(f"a row per point, {_ROW_RUNS} runs of {_POINTS:,}", [theirs.compare])
    rates = f"{ours.ingest_per_s:,.0f} points/s; a row per point, from numbers: {theirs.ingest_per_s:,.0f}"
    print(f"ingest, CPU time, from metrics.jsonl: {rates}")
    print(f"bytes a point: {ours.bytes / points:.2f}; a row per point: {theirs.bytes / row_points:.2f}\n")
    scale = runs / _ROW_RUNS
    return [
        Bar("a comparison of all runs", ours.compare.min_s, theirs.compare.min_s * scale, "a row per point", 0.05),
        Bar("bytes a point", ours.bytes / points, theirs.bytes / row_points, "a row per point", 0.4),
        Bar("a comparison of all runs, in seconds", ours.compare.min_s, 1.0, "one second", 1.0),
        Bar("bytes a point, at most 10", ours.bytes / points, 10.0, "ten bytes", 1.0),
        Bar("ingest, at least 200,000 points/s", 200_000 / ours.ingest_per_s, 1.0, "that", 1.0),
    ]


class _Result:
    def __init__(self, name: str) -> None:
        self.compare = Row(f"{name}: compare")
        self.zoom = Row(f"{name}: zoom of one run")
        self.ingest_per_s = 0.0
        self.bytes = 0


async def _ours(folder: Path, runs: int) -> _Result:
    result = _Result("metric store")
    store = MetricStore(folder / "metrics.db")
    await store.open()
    for run in range(runs):
        await store.append({SeriesKey(job_owner(run), 1, 0, "loss"): _curve(run)})
        await store.seal(job_owner(run))
    result.bytes = await store.size_bytes()
    everything = Wanted(tuple(job_owner(run) for run in range(runs)), ("loss",), bins=_BINS)
    near = Wanted((job_owner(0),), ("loss",), first_step=40_000, last_step=42_000, bins=1000)
    for _ in range(3):
        for row, wanted in ((result.compare, everything), (result.zoom, near)):
            begun = time.perf_counter()
            dumps(await store.curves(wanted))  # as the API answers
            row.seconds.append(time.perf_counter() - begun)
    await store.close()
    result.ingest_per_s = await _ingest(folder)
    return result


async def _ingest(folder: Path) -> float:
    file = folder / "jobs/1/attempt_1/output/metrics.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(_lines()))
    store = MetricStore(folder / "ingest.db")
    await store.open()
    begun = time.process_time()  # of all our threads: what else runs on the machine takes no part in it
    count = await Collector(folder / "jobs", store).finish(1)
    taken_s = time.process_time() - begun
    await store.close()
    return count / taken_s


def _rows(folder: Path) -> _Result:
    result = _Result("row per point")
    file = folder / "rows.db"
    db = sqlite3.connect(file)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE points (run INTEGER, key TEXT, step INTEGER, time REAL, value REAL)")
    db.execute("CREATE INDEX by_run ON points (run, key, step)")
    begun = time.process_time()
    for run in range(_ROW_RUNS):
        curve = _curve(run)
        rows = zip(curve.steps, curve.times_ms, curve.values, strict=True)
        with db:
            db.executemany(f"INSERT INTO points VALUES ({run}, 'loss', ?, ?, ?)", rows)
    result.ingest_per_s = _ROW_RUNS * _POINTS / (time.process_time() - begun)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    result.bytes = os.path.getsize(file)
    query = (
        "SELECT run, step / 512 AS bin, MIN(value), MAX(value), AVG(value), COUNT(*) FROM points "
        "WHERE key = 'loss' GROUP BY run, bin"
    )
    for _ in range(3):
        begun = time.perf_counter()
        json.dumps(db.execute(query).fetchall())
        result.compare.seconds.append(time.perf_counter() - begun)
    db.close()
    return result


def _curve(run: int) -> Points:
    """A loss that falls, with noise that no compressor can foresee; each run's is its own."""
    values, times = _noise()
    turn = run * 97 % _POINTS
    return Points(list(range(_POINTS)), list(times), [*values[turn:], *values[:turn]])


@functools.cache
def _noise() -> tuple[list[float], list[int]]:
    chance = random.Random(1)
    values = [2 * math.exp(-3 * step / _POINTS) + chance.gauss(0, 0.05) for step in range(_POINTS)]
    return values, [1_700_000_000_000 + 50 * step + chance.randrange(10) for step in range(_POINTS)]


def _lines() -> Iterator[str]:
    chance = random.Random(3)
    for step in range(_FILE_LINES):
        values = {name: chance.random() for name in _NAMES}
        yield json.dumps({"time": 1.7e9 + step / 20, "step": step, "rank": 0, "values": values}) + "\n"
