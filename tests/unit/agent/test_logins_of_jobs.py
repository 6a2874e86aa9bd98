"""Where jobs run in the accounts of their users, what belongs to a node is found by the node's name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import cast

from tests.unit.agent.test_forecasts import SPEC
from tests.unit.store.test_database import in_store
from ugro.features.power.model import OwnerReport, Then, When
from ugro.features.power.owners import OwnerRequests, Owners
from ugro.features.training.rules_energy import NodePart, Price, watts
from ugro.features.training.service import EnergyService
from ugro.kernel.files.results.job_folder import energy_file
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Job, JobState, Placement, Share
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import KeyedTasks
from ugro.kernel.telemetry.metricstore import MetricStore

PLACEMENT = Placement((Share("ann@gpu1", (0,)), Share("ann@gpu2", (0,))))


async def running(store: Store) -> Job:
    job = (await store.jobs.submit(SPEC, "ann", "one")).job
    return await store.jobs.move(await store.jobs.start(job, PLACEMENT, "free"), JobState.RUNNING, "every rank runs")


def test_the_power_of_a_node_has_its_name_and_not_that_of_a_login(tmp_path: Path) -> None:
    async def work(store: Store) -> list[NodePart]:
        job = await running(store)
        for node in PLACEMENT.nodes:
            path = energy_file(tmp_path / str(job.id), job.attempt, node)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [{"s": s, "time": 1000.0 + s, "devices": {"gpu0": [80.0 * s, s, "counter"]}} for s in (10, 20)]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return await EnergyService(tmp_path, store.jobs, cast(MetricStore, None), Price).parts(job, job.attempt)

    parts = in_store(tmp_path / "state.db", work)
    assert watts(parts, 1005.0, 1015.0) == {"gpu1": [80.0], "gpu2": [80.0]}


class _Runs:
    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    def runs(self, node: str) -> _Runs:
        self._node = node
        return self

    async def take_part(self, job: int, attempt: int, part: float, *, binds_cores: bool) -> None:
        self.asked.append((self._node, part))


class _Owners:
    """The owner of gpu1 is there, where jobs shrink; for a while the node cannot be heard."""

    def __init__(self) -> None:
        self.is_heard = True

    def report(self, node: str) -> OwnerReport | None:
        return OwnerReport(When.ACTIVE, Then.SHRINK, 60.0, is_there=True, sign="keys") if node == "gpu1" else None

    def heard(self) -> dict[str, OwnerReport]:
        report = self.report("gpu1")
        return {"gpu1": report} if report is not None and self.is_heard else {}


def test_a_share_stays_small_while_the_owner_is_there_and_the_node_is_not_heard(tmp_path: Path) -> None:
    async def work(store: Store) -> tuple[list[tuple[str, float]], bool]:
        job, runs, owners, is_done = await running(store), _Runs(), _Owners(), asyncio.Event()
        tasks = KeyedTasks(is_done.set)
        requests = OwnerRequests(store.jobs, cast(RunTracker, runs), cast(Owners, owners), tasks)
        requests.look([job])
        await is_done.wait()
        owners.is_heard = False
        requests.look([job])
        is_asked_again = ("part", job.id, job.attempt, "ann@gpu1") in tasks
        await tasks.close()
        return runs.asked, is_asked_again

    assert in_store(tmp_path / "state.db", work) == ([("ann@gpu1", 0.1)], False)
