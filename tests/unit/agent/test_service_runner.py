"""The loop of one service over a real store, with a cluster that records what it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.stores import store_at
from tests.unit.policy.serving.places import job, ready, service
from ugro.features.services.model import Door, DoorPlace, Replica, Rollout, Service
from ugro.features.services.rules.steps import View
from ugro.features.services.service.runner import Runner
from ugro.kernel.jobs.model import Job, JobSpec
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotAllowed, UgroError


class Cluster:
    """Implements ``runner.Parts``, as far as a service without running jobs needs it."""

    def __init__(self, store: Store) -> None:
        self.services, self.store = store.services, store.jobs
        self.jobs: Any = self
        self.watch: Any = self
        self.submitted: list[str] = []
        self.refused: set[str] = set()
        self.while_looking: Callable[[], Coroutine[Any, Any, object]] | None = None

    def door(self, service: Service, job: Job) -> Door:
        raise AssertionError("no door runs")

    async def drained(self) -> dict[str, str]:
        if self.while_looking is not None:
            doing, self.while_looking = self.while_looking, None
            await doing()
        return {}

    def speed(self, node: str) -> float | None:
        return None

    def is_beside_door(self, service: Service, node: str) -> bool:
        return node == service.door.node

    async def door_address(self, service: Service) -> str:
        return service.door.address

    async def next_door(self, service: Service, *, has_failed: bool) -> DoorPlace:
        raise AssertionError("no door was lost")

    async def submit_door(self, service: Service) -> None:
        self.submitted.append("door")

    async def submit_made(self, spec: JobSpec, user: str, key: str) -> None:
        if spec.name in self.refused:
            raise NotAllowed("it cannot be submitted now")
        self.submitted.append(spec.name)

    def keep(self, service: int, runs: object) -> None: ...


def looking(folder: Path, made: Service, test: Callable[[Cluster, Runner], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        store = store_at(folder / "state.db")
        await store.open()
        try:
            cluster = Cluster(store)
            await test(cluster, Runner(cluster, await store.services.add(made), lambda: None))
        finally:
            await store.close()

    asyncio.run(run())


def test_what_was_decided_is_not_done_to_a_service_that_somebody_changed_meanwhile(tmp_path: Path) -> None:
    async def test(cluster: Cluster, runner: Runner) -> None:
        cluster.while_looking = lambda: runner.change(lambda one: replace(one, wanted=1))
        await runner.look()
        assert runner.service.rollout == Rollout(2), "with nothing wanted it would have been complete"
        assert [one.revision for one in runner.service.replicas] == [2]

    looking(tmp_path, service(0, rollout=Rollout(2)), test)


def test_a_step_that_fails_holds_none_of_the_others_up(tmp_path: Path) -> None:
    async def test(cluster: Cluster, runner: Runner) -> None:
        cluster.refused = {"chat-1"}
        with pytest.raises(UgroError, match="cannot be submitted now"):
            await runner.look()
        assert cluster.submitted == ["chat-2", "door"]

    made = service(2, replicas=(Replica(1, 1), Replica(2, 1)))
    looking(tmp_path, replace(made, spec=replace(made.spec, spreads=False)), test)


def test_after_very_many_ends_the_next_replica_waits_no_longer_than_the_longest_pause(tmp_path: Path) -> None:
    async def test(cluster: Cluster, runner: Runner) -> None:
        runner._ends = [time.monotonic()] * 5000
        await runner.look()
        assert not runner.view.may_replace

    looking(tmp_path, service(0), test)


def test_the_loopback_of_the_door_is_no_place_for_a_replica_of_another_machine(tmp_path: Path) -> None:
    """Its node could send requests to whatever listens there."""

    async def test(cluster: Cluster, runner: Runner) -> None:
        far = replace(ready(2), job=job(2, node="n2"))
        runner.view = View(runner.service, (ready(1), far))
        runner._expect_place(1, "127.0.0.1")
        runner._expect_place(2, "10.0.0.2")
        with pytest.raises(UgroError, match="which the door does not reach"):
            runner._expect_place(2, "127.0.0.9")

    looking(tmp_path, service(2), test)
