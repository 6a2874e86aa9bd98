"""Trials and predictions on disk: known again, bounded, and gone with their job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.store.test_database import in_store
from ugro.features.planning import store as trials
from ugro.features.planning.model import Forecast, JointTrial, NodeTrial, Point, Prediction, RankTrial
from ugro.kernel.jobs.model import JobSpec, JobState
from ugro.kernel.store.database import Store

ALONE = NodeTrial("gpu1", "RTX 4070", (RankTrial((Point(8, 0.5, 0.1, 4, 1000),), 0.1, 0.0, 64),), 96, 10, 40)
TOGETHER = JointTrial(("gpu1", "gpu2"), (64, 32), (0.5, 0.4), 0.1, 0.6)
MADE = Forecast(Prediction(("gpu1",), 412.0, 0.08, 0.2, 0.0, (96,)), "2026-01-01T00:00:00+00:00")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def test_a_trial_is_known_again_by_its_key_and_replaced_by_a_newer_one(file: Path) -> None:
    async def work(store: Store) -> tuple[object, ...]:
        await store.trials.put({"a": ALONE, "b": TOGETHER}, "2026-01-01")
        found = await store.trials.get(NodeTrial, ["a", "x"])
        joint = await store.trials.get(JointTrial, ["b"])
        await store.trials.put({"a": NodeTrial("gpu1", "other", (), 1, 1, 1)}, "2026-01-02")
        return found, joint, (await store.trials.get(NodeTrial, ["a"]))["a"].device

    assert in_store(file, work) == ({"a": ALONE}, {"b": TOGETHER}, "other")


def test_what_another_version_wrote_is_not_known(file: Path) -> None:
    async def work(store: Store) -> object:
        await store.trials.put({"a": {"node": 7}}, "2026-01-01")
        return await store.trials.get(NodeTrial, ["a"])

    assert in_store(file, work) == {}


def test_the_oldest_trials_go_when_there_are_too_many(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> set[str]:
        for number in range(5):
            await store.trials.put({f"k{number}": ALONE}, f"2026-01-0{number + 1}")
        return set(await store.trials.get(NodeTrial, [f"k{number}" for number in range(5)]))

    monkeypatch.setattr(trials, "MOST_TRIALS", 3)
    assert in_store(file, work) == {"k2", "k3", "k4"}


def test_the_first_prediction_of_a_job_stays(file: Path) -> None:
    later = Forecast(Prediction(("gpu2",), 1.0, 0.1, 1.0, 0.0, (1,)), "2026-02-02T00:00:00+00:00")

    async def work(store: Store) -> list[Forecast | None]:
        job = (await store.jobs.submit(JobSpec("x", ("true",)), "ann", "k1")).job
        await store.trials.note(job.id, MADE)
        await store.trials.note(job.id, later)
        return [await store.trials.forecast(job.id), await store.trials.forecast(job.id + 1)]

    assert in_store(file, work) == [MADE, None]


def test_a_prediction_goes_with_its_job(file: Path) -> None:
    async def work(store: Store) -> tuple[list[int], Forecast | None]:
        job = (await store.jobs.submit(JobSpec("x", ("true",)), "ann", "k1")).job
        await store.trials.note(job.id, MADE)
        await store.jobs.move(job, JobState.CANCELLED, "test")
        gone = await store.retention.remove([job.id], "2026-01-01T00:00:00.000+00:00", str)
        return gone, await store.trials.forecast(job.id)

    assert in_store(file, work) == ([1], None)
