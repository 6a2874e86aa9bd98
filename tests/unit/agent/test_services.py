from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.stores import store_at
from tests.unit.policy.ray.clusters import cluster
from tests.unit.policy.serving.places import service
from ugro.agent.jobs.submission import Submit
from ugro.agent.services.creation import Prepared, ServiceRequest
from ugro.agent.services.ray_place import RayPlaces
from ugro.agent.services.service import Services
from ugro.core.errors import NotAllowed


class Nobody:
    """In the place of jobs, nodes and what makes services of requests."""

    def expect_submittable(self) -> None: ...

    preparing = None

    def starts_cluster(self, request: ServiceRequest) -> bool:
        return False

    async def prepare(self, request: ServiceRequest) -> Prepared:
        made, key = service(), request.submit.key
        return Prepared(replace(made, request_key=key, spec=replace(made.spec, name=key)))


def test_two_services_do_not_get_one_port_although_neither_listens_yet(tmp_path: Path) -> None:
    async def run() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        try:
            nobody: Any = Nobody()
            services = Services(store, nobody, nobody, nobody, RayPlaces(store.services, nobody), nobody)
            await services.create(ServiceRequest(Submit("ann", "one")))
            with pytest.raises(NotAllowed, match="port 8000 on n1 is that of the service one"):
                await services.create(ServiceRequest(Submit("ann", "two")))
        finally:
            await store.close()

    asyncio.run(run())


def test_a_service_and_the_cluster_that_is_started_for_it_are_recorded_together_or_not_at_all(tmp_path: Path) -> None:
    async def run() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        try:
            made = replace(service(), request_key="one")
            first, started = await store.services.add_with_cluster(made, cluster(1))
            assert [one.name for one in await store.ray_clusters.open()] == [started.name if started else ""]
            assert await store.services.add_with_cluster(made, cluster(1)) == (first, None), "the same request again"
            other = replace(made, request_key="two", spec=replace(made.spec, name="other"))
            with pytest.raises(NotAllowed, match="Ray cluster ray already"):
                await store.services.add_with_cluster(other, cluster(1))
            assert not await store.services.is_taken("other")
        finally:
            await store.close()

    asyncio.run(run())
