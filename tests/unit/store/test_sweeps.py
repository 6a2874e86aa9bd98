"""Sweeps and trials on disk: created once, numbered without gaps, and found again as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.store.test_database import in_store
from ugro.features.sweeps.model import Budget, Point, Sweep, SweepState, Trial, TrialState
from ugro.features.sweeps.store import NewSweep
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotFound

NEW = NewSweep("k1", "train", "ann", "{}", '{"snapshot":"abc"}', Budget(trials=3, time_s=1.5))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def test_the_same_key_is_the_same_sweep_and_a_name_means_the_newest(file: Path) -> None:
    async def work(store: Store) -> list[Sweep]:
        first = await store.sweeps.create(NEW)
        again = await store.sweeps.create(replace(NEW, name="other"))
        second = await store.sweeps.create(replace(NEW, key="k2"))
        words = [await store.sweeps.find(word, None) for word in ("train", "last", str(first.id))]
        with pytest.raises(NotFound, match="there is no sweep 'none'"):
            await store.sweeps.find("none", None)
        with pytest.raises(NotFound) as mistyped:
            await store.sweeps.find("trian", None)
        assert mistyped.value.hint == "did you mean train?"
        assert again == first == words[2]
        assert words[:2] == [second, second]
        return [first]

    [first] = in_store(file, work)
    assert (first.budget, first.state) == (NEW.budget, SweepState.RUNNING)


def test_a_number_comes_before_a_name(file: Path) -> None:
    async def work(store: Store) -> None:
        first = await store.sweeps.create(NEW)
        called_one = await store.sweeps.create(replace(NEW, key="k2", name="1"))
        called_nine = await store.sweeps.create(replace(NEW, key="k3", name="9"))
        assert [await store.sweeps.find(word, None) for word in ("1", "2", "9")] == [first, called_one, called_nine]

    in_store(file, work)


def test_a_trial_is_found_again_as_it_was(file: Path) -> None:
    settings = (("lr", "0.1"), ("opt", '{"name": "é"}'))

    async def write(store: Store) -> Trial:
        sweep = await store.sweeps.create(NEW)
        trial = await store.sweeps.add(sweep.id, settings, [("lr", 0.1), ("opt", 0.0)])
        other = await store.sweeps.add(sweep.id, settings, [])
        assert (trial.number, other.number) == (1, 2)
        ended = replace(
            trial,
            state=TrialState.PRUNED,
            job=7,
            last=2.0,
            best=1.0,
            step=9,
            took_s=1.5,
            gpus=2,
            reason="worse",
            ending=TrialState.PRUNED,
            history=(Point(1, 2.5), Point(9, 1.0)),
        )
        await store.sweeps.put(sweep.id, ended)
        return ended

    async def read(store: Store) -> list[Trial]:
        return await store.sweeps.trials(1)

    ended = in_store(file, write)
    assert in_store(file, read)[0] == ended


def test_what_a_person_has_stopped_is_not_done_and_its_code_is_kept(file: Path) -> None:
    async def work(store: Store) -> None:
        sweep = await store.sweeps.create(NEW)
        assert [one.id for one in await store.sweeps.unfinished()] == [sweep.id]
        await store.sweeps.move(sweep.id, SweepState.STOPPED, "by a person")
        await store.sweeps.end(sweep.id, SweepState.DONE, "all trials were made")
        await store.sweeps.say(sweep.id, "waits")
        found = await store.sweeps.get(sweep.id)
        assert (found.state, found.reason) == (SweepState.STOPPED, "by a person")
        assert await store.sweeps.snapshots() == ["abc"]
        assert await store.sweeps.unfinished() == []
        trial = await store.sweeps.add(sweep.id, (), [])
        assert [one.id for one in await store.sweeps.unfinished()] == [sweep.id], "a trial is open"
        await store.sweeps.put(sweep.id, replace(trial, state=TrialState.STOPPED))
        resumed = await store.sweeps.move(sweep.id, SweepState.RUNNING, "", Budget(trials=9))
        assert (await store.sweeps.get(sweep.id)).budget == resumed.budget == Budget(trials=9)
        await store.sweeps.end(sweep.id, SweepState.DONE, "all")
        assert await store.sweeps.snapshots() == []

    in_store(file, work)
