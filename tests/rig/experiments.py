"""Thousands of experiments in a state directory, without running one: jobs and their metrics, written to the stores."""

from __future__ import annotations

import asyncio
import math
import random
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.jobs.moves import About
from ugro.kernel.store.database import Store
from ugro.kernel.support.state_dir import StateDir
from ugro.kernel.telemetry.curves import Points, SeriesKey
from ugro.kernel.telemetry.metricstore import MetricStore, job_owner

RATES = ("1e-4", "3e-4", "1e-3", "3e-3")
SIZES = ("32", "64")
SEEDS = ("1", "2", "3", "4", "5")
_AT_ONCE = 250
_NAMES = ("resnet", "vit", "gpt-small")


def spec_of(number: int) -> JobSpec:
    """Of the job with that number: every combination of rate, size and seed comes again and again."""
    seed, rest = number % len(SEEDS), number // len(SEEDS)
    rate, size = RATES[rest % len(RATES)], SIZES[rest // len(RATES) % len(SIZES)]
    name = _NAMES[rest // (len(RATES) * len(SIZES)) % len(_NAMES)]
    flags = ("--lr", rate, f"--batch_size={size}", "--seed", SEEDS[seed], "--epochs", "3")
    return JobSpec(name, ("python", "train.py", *flags), env=(("WANDB_API_KEY", "hush"),))


def best_loss(number: int) -> float:
    """What job ``number`` comes to, exactly: so a table's order can be foreseen."""
    return 0.1 + (number * 7919 % 100_003) / 100_003


def make_experiments(home: Path, count: int, points: int = 40, *, is_sealed: bool = False) -> None:
    """Jobs 1 to ``count``; no agent may run there. Every 50th has failed, every 97th recorded nothing.

    ``is_sealed``: curves are put in order, as an agent does when a job has ended; it takes a commit for each.
    """
    home.mkdir(exist_ok=True, parents=True)
    asyncio.run(_make_jobs(home, count))
    _end_jobs(home, count)
    asyncio.run(_make_metrics(home, count, points, is_sealed))


def has_metrics(number: int) -> bool:
    return number % 97 != 0


async def _make_jobs(home: Path, count: int) -> None:
    store = Store(StateDir(home).database)
    await store.open()
    for begin in range(1, count + 1, 1000):
        numbers = range(begin, min(begin + 1000, count + 1))
        await store.jobs.submit_many((spec_of(number), "ann", f"key {number}", About()) for number in numbers)
    await store.close()


def _end_jobs(home: Path, count: int) -> None:
    first = datetime.now(UTC) - timedelta(minutes=count)
    rows = []
    for number in range(1, count + 1):
        state = "failed" if number % 50 == 0 else "succeeded"
        begun = first + timedelta(minutes=number)
        ended = begun + timedelta(seconds=60 + number % 600)
        times = (when.isoformat(timespec="milliseconds") for when in (begun, begun, ended))
        rows.append((state, f"it {state}", *times, number))
    with closing(sqlite3.connect(StateDir(home).database)) as db, db:
        columns = "state = ?, reason = ?, submitted_at = ?, started_at = ?, ended_at = ?"
        db.executemany(f"UPDATE jobs SET attempt = 1, {columns} WHERE id = ?", rows)


async def _make_metrics(home: Path, count: int, points: int, is_sealed: bool) -> None:
    store = MetricStore(StateDir(home).metrics)
    await store.open()
    chance = random.Random(1)
    noise = [chance.gauss(0, 0.02) for _ in range(points + 997)]
    for begin in range(1, count + 1, _AT_ONCE):
        numbers = [number for number in range(begin, min(begin + _AT_ONCE, count + 1)) if has_metrics(number)]
        await store.append({key: some for number in numbers for key, some in _curves(number, points, noise).items()})
        for number in numbers if is_sealed else ():
            await store.seal(job_owner(number))
    await store.close()


def _curves(number: int, points: int, noise: list[float]) -> dict[SeriesKey, Points]:
    steps = [10 * step for step in range(points)]
    begun_ms = int(time.time() * 1000) - 3_600_000  # what is a year old is forgotten
    times = [begun_ms + 100 * step for step in steps]
    least, turn = best_loss(number), number % 997
    fall = [math.exp(-4 * at / points) * 2 + abs(noise[turn + at]) for at in range(points)]
    loss = [least + value for value in fall]
    loss[-1] = least
    accuracy = [1 - value / 4 for value in loss]
    rates = [1e-3 * (1 - at / points) for at in range(points)]
    owner = job_owner(number)
    return {
        SeriesKey(owner, 1, 0, "loss"): Points(steps, times, loss),
        SeriesKey(owner, 1, 0, "val/acc"): Points(list(steps), list(times), accuracy),
        SeriesKey(owner, 1, 0, "lr"): Points(list(steps), list(times), rates),
    }
