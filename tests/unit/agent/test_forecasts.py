"""A trial is used again only for a training that is as fast: the same code, arguments, variables and device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.store.test_database import in_store
from ugro.features.hardware.model import LinkFigures, Measurement, Mode
from ugro.features.planning.forecasts import Forecasts, that_counts
from ugro.features.planning.model import (
    JointFailure,
    JointTrial,
    Links,
    NodeTrial,
    Point,
    Prediction,
    RankTrial,
    compared,
)
from ugro.features.planning.rules import Link
from ugro.features.planning.service import Request, trial_spec
from ugro.kernel.jobs.model import (
    ALL_GPUS,
    ANY_GPUS,
    After,
    Checkpoint,
    JobSpec,
    Launcher,
    Placement,
    Resources,
    ResultRule,
    Retry,
    Share,
)
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.store.database import Store

SPEC = JobSpec(
    "train",
    ("train.py", "--size", "4", "--epochs", "10"),
    Launcher.DDP,
    env=(("A", "1"),),
    snapshot="abc",
    resources=Resources(min_nodes=1, max_nodes=3, gpus_per_node=ANY_GPUS),
)


@pytest.mark.parametrize(
    "same",
    [
        {"name": "other", "priority": 90, "time_limit_s": 5.0, "seed": 3, "notify": ("mail",)},
        {"argv": ("train.py", "--size", "4", "--epochs", "99", "--lr=0.1")},
        {"resources": Resources(min_nodes=2, max_nodes=2, only=("a", "b"), labels=("x",))},
        {"checkpoint": Checkpoint("ckpt"), "after": After((1,)), "retry": Retry(3), "results": ResultRule("none")},
    ],
)
def test_what_does_not_change_a_step_does_not_count(same: dict[str, object]) -> None:
    assert that_counts(replace(SPEC, **same)) == that_counts(SPEC)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        {"snapshot": "abd"},
        {"argv": ("train.py", "--size", "8", "--epochs", "10")},
        {"argv": ("other.py", "--size", "4", "--epochs", "10")},
        {"env": (("A", "2"),)},
        {"setup": "pip install x"},
        {"launcher": Launcher.TORCHRUN},
        {"resources": Resources(cpus=2)},
    ],
)
def test_what_may_change_a_step_counts(other: dict[str, object]) -> None:
    assert that_counts(replace(SPEC, **other)) != that_counts(SPEC)  # type: ignore[arg-type]


def test_a_trial_is_a_job_on_its_node_that_leaves_nothing_and_ends_in_time() -> None:
    rich = replace(SPEC, checkpoint=Checkpoint("ckpt"), outputs=("*.csv",), retry=Retry(3), notify=("mail",))
    made = trial_spec(Request(rich, (Share("gpu1", (0, 1)),), 3, 30.0, "ann"))
    assert made.name == "trial-train"
    assert dict(made.env) == {"A": "1", "UGRO_TRIAL": "solo:3:30"}
    wanted = made.resources
    assert (wanted.only, wanted.min_nodes, wanted.max_nodes, wanted.gpus_per_node) == (("gpu1",), 1, 1, ALL_GPUS)
    assert (made.checkpoint, made.outputs, made.retry, made.notify) == (Checkpoint(), (), Retry(), ())
    assert (made.results.checkpoints, made.results.workdir) == ("none", False)
    assert made.time_limit_s == 300
    assert (made.priority, made.is_preemptible) == (0, False), "no job is stopped for it"
    together = trial_spec(Request(SPEC, (Share("a"), Share("b")), 3, 30.0, "ann"))
    assert dict(together.env)["UGRO_TRIAL"] == "joint:3:30"
    assert (together.resources.only, together.resources.min_nodes) == (("a", "b"), 2)
    assert together.resources.gpus_per_node == 0


def test_the_slower_direction_of_a_measured_link_counts_and_a_failed_one_does_not(tmp_path: Path) -> None:
    there = LinkFigures("a", "b", "2026-01-01T00:00:00+00:00", 100e6, 80e6, 0.001)
    broken = LinkFigures("a", "c", "2026-01-01T00:00:00+00:00", error="refused")

    async def work(store: Store) -> dict[frozenset[str], Link]:
        await store.hardware.record(Measurement(there.measured_at, Mode.QUICK, 1.0, links=(there, broken)), {})
        return await Forecasts(store.trials, store.hardware, Cluster(None), lambda node: None).links(["a", "b", "c"])

    assert in_store(tmp_path / "state.db", work) == {frozenset("ab"): Link(80e6, 0.0005)}


SHARES = (Share("a"), Share("b"), Share("c"))
TOGETHER = JointTrial(("a", "b", "c"), (32, 32, 32), (0.3, 0.3, 0.3), 0.01, 0.31, whole_s=0.01)


async def with_trials(store: Store) -> Forecasts:
    """Each node alone was measured."""
    forecasts = Forecasts(store.trials, store.hardware, Cluster(None), lambda node: None)
    rank = RankTrial((Point(16, 0.16, 0.0, 12), Point(96, 0.96, 0.0, 12)))
    for share in SHARES:
        await forecasts.keep(SPEC, (share,), NodeTrial(share.node, "a device", (rank,), 96, 1000, 4000))
    return forecasts


def test_nodes_whose_joint_trial_failed_are_not_predicted_together_until_one_succeeds(tmp_path: Path) -> None:
    async def work(store: Store) -> list[list[Prediction | None]]:
        forecasts, found = await with_trials(store), []
        for newest in (None, JointFailure(("a", "b", "c"), "no route"), TOGETHER):
            if newest is not None:
                await forecasts.keep(SPEC, SHARES, newest)
            sets = [SHARES, SHARES[:2], SHARES[:1]]
            found.append([await forecasts.predict(SPEC, Placement(shares)) for shares in sets])
        return found

    def links(found: list[Prediction | None]) -> list[Links | None]:
        return [None if one is None else one.links for one in found]

    untried, failed, tried = in_store(tmp_path / "state.db", work)
    assert links(untried) == [Links.ASSUMED, Links.ASSUMED, Links.NONE]
    assert links(failed) == [None, None, Links.NONE]
    assert links(tried) == [Links.TRIAL, Links.TRIAL, Links.NONE]
    assert untried[0] is not None
    assert tried[0] is not None
    assert "with an assumed network" in compared(untried[0], 100.0)
    assert "assumed" not in compared(tried[0], 100.0)


def test_a_smaller_set_that_was_tried_by_itself_is_predicted_though_the_larger_one_failed(tmp_path: Path) -> None:
    two = replace(TOGETHER, nodes=("a", "b"), shares=(48, 48), own_s=(0.5, 0.5))

    async def work(store: Store) -> list[bool]:
        forecasts = await with_trials(store)
        await forecasts.keep(SPEC, SHARES[:2], two)
        await forecasts.keep(SPEC, SHARES, JointFailure(("a", "b", "c"), "no route"))
        return [(await forecasts.known(SPEC, SHARES[:count])).can_join for count in (2, 3)]

    assert in_store(tmp_path / "state.db", work) == [True, False]


def test_a_smaller_set_that_failed_is_predicted_after_a_larger_one_succeeded(tmp_path: Path) -> None:
    async def work(store: Store) -> bool:
        forecasts = await with_trials(store)
        await forecasts.keep(SPEC, SHARES[:2], JointFailure(("a", "b"), "no route", "2026-01-01T00:00:00+00:00"))
        await forecasts.keep(SPEC, SHARES, replace(TOGETHER, at="2026-01-02T00:00:00+00:00"))
        return (await forecasts.known(SPEC, SHARES[:2])).can_join

    assert in_store(tmp_path / "state.db", work)


def test_of_a_script_that_asks_for_local_sgd_itself_nothing_is_predicted(tmp_path: Path) -> None:
    async def work(store: Store) -> list[Prediction | None]:
        forecasts, found = await with_trials(store), []
        for is_of_local in (False, True):
            [trial] = (await forecasts.known(SPEC, SHARES[:1])).trials.values()
            await forecasts.keep(SPEC, SHARES[:1], replace(trial, is_of_local=is_of_local))
            found.append(await forecasts.predict(SPEC, Placement(SHARES[:1])))
        return found

    step, local = in_store(tmp_path / "state.db", work)
    assert step is not None
    assert local is None
