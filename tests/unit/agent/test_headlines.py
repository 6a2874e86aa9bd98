"""What a job's headline is made of."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ugro.features.training.model import Headline
from ugro.features.training.service import MOST_IN_A_LIST, Headlines
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share
from ugro.kernel.links.model import LinkQuality, NodeReport, Status
from ugro.kernel.telemetry.curves import Points, SeriesKey
from ugro.kernel.telemetry.metricstore import MetricStore, job_owner

BEHIND_S = 600.0


def _job(number: int = 7) -> Job:
    spec, place = JobSpec("train", ("train.py", "--max-steps", "100")), Placement((Share("gpu1"),))
    return Job(number, spec, "ann", JobState.RUNNING, "", "2026-01-01T00:00:00+00:00", attempt=1, placement=place)


async def _unmeasured(job: Job) -> None:
    return None


def _headline(folder: Path, offset_s: float | None) -> Headline:
    """Of a training with a step every two seconds, on a node whose clock is behind."""

    async def work() -> Headline:
        store = MetricStore(folder / "metrics.db")
        await store.open()
        now_ms = int((time.time() - BEHIND_S) * 1000)
        times = [now_ms - 2000 * (39 - at) for at in range(40)]
        key = SeriesKey(job_owner(7), 1, 0, "loss")
        await store.append({key: Points(list(range(1, 41)), times, [1.0] * 40)})
        report = NodeReport("gpu1", Status.HEALTHY, 100, link=LinkQuality(clock_offset_s=offset_s))
        found = await Headlines(folder, store, lambda: {"gpu1": report}, _unmeasured).of(_job())
        await store.close()
        return found

    return asyncio.run(work())


def test_a_clock_that_is_behind_is_no_training_that_stands_still(tmp_path: Path) -> None:
    found = _headline(tmp_path, -BEHIND_S).progress
    assert found is not None
    assert found.stalled_s is None
    assert found.left_s is not None
    assert 100 < found.left_s <= 120


def test_silence_is_told(tmp_path: Path) -> None:
    found = _headline(tmp_path, 0.0).progress
    assert found is not None
    assert found.stalled_s is not None
    assert found.stalled_s >= BEHIND_S


def test_a_list_has_the_headlines_of_its_first_jobs(tmp_path: Path) -> None:
    async def work() -> dict[int, str]:
        store = MetricStore(tmp_path / "metrics.db")
        await store.open()
        jobs = [_job(number) for number in range(2 * MOST_IN_A_LIST)]
        found = await Headlines(tmp_path, store, dict, _unmeasured).words(jobs)
        await store.close()
        return found

    assert list(asyncio.run(work())) == list(range(MOST_IN_A_LIST))
