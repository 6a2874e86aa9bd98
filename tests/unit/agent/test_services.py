from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.stores import in_store, store_at
from tests.unit.policy.ray.clusters import cluster
from tests.unit.policy.serving.places import service
from ugro.agent.jobs.submission import Submit
from ugro.agent.ray_cluster.service import RayClusters
from ugro.agent.services.creation import Prepared, ServiceRequest
from ugro.agent.services.ray_place import RayPlaces
from ugro.agent.services.service import Services
from ugro.agent.support.caller import enter
from ugro.core.errors import NotAllowed
from ugro.core.identity import Caller, Role
from ugro.core.job import Job
from ugro.core.python_env import EnvRequest
from ugro.core.ray_cluster import ClusterState, RayCluster
from ugro.core.service import RayPlace
from ugro.store.database import Store


class Nobody:
    """In the place of jobs, nodes and what makes services of requests."""

    def expect_submittable(self) -> None: ...

    async def with_reasons(self, jobs: list[Job]) -> list[Job]:
        return jobs

    def is_personal(self, cluster: RayCluster) -> bool:
        return False

    async def lack_of_serve(self, cluster: RayCluster) -> None: ...

    preparing = None

    def starts_cluster(self, request: ServiceRequest) -> bool:
        return False

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def read(self, request: ServiceRequest) -> None:
        if request.submit.key == "slow":
            await self.may_read.wait()

    async def prepare(self, request: ServiceRequest, read: None) -> Prepared:
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


def test_a_service_whose_packages_are_resolved_keeps_no_other_waiting(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        nobody: Any = Nobody()
        nobody.may_read.clear()
        services = Services(store, nobody, nobody, nobody, RayPlaces(store.services, nobody), nobody)
        slow = asyncio.create_task(services.create(ServiceRequest(Submit("ann", "slow"))))
        async with asyncio.timeout(20):
            await services.create(ServiceRequest(Submit("bob", "one")))
            nobody.may_read.set()
            with pytest.raises(NotAllowed, match="is that of the service one"):
                await slow

    in_store(tmp_path, work)


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


# --- on a Ray cluster ---------------------------------------------------------------------------------------------

PASSWORD = EnvRequest(index_url="https://ann:hush@pypi.corp/simple")


def ray_places(store: Store, folder: Path) -> RayPlaces:
    nobody: Any = Nobody()
    return RayPlaces(store.services, RayClusters(folder, store, nobody, nobody, nobody))


def test_a_cluster_is_for_its_user_and_its_passwords_are_for_nobody_else(tmp_path: Path) -> None:
    bob, olga = Caller("bob", Role.USER, ""), Caller("olga", Role.OPERATOR, "")
    ann, alone = replace(bob, user="ann"), Caller("root", Role.ADMIN, "", shares_account=True, is_alone=True)

    async def work(store: Store) -> None:
        places = ray_places(store, tmp_path)
        plain = await store.ray_clusters.add(cluster(1))
        for may in (ann, olga, alone):
            enter(may)
            assert await places.existing("ray", may.user) == plain
        enter(bob)
        with pytest.raises(NotAllowed, match="the Ray cluster ray is ann's"):
            await places.existing("ray", "bob")
        await store.ray_clusters.put(replace(plain, environment=PASSWORD))
        for may in (ann, alone):
            enter(may)
            assert (await places.existing("ray", may.user)).environment == PASSWORD
        enter(olga)
        with pytest.raises(NotAllowed, match="has passwords of ann"):
            await places.existing("ray", "olga")

    in_store(tmp_path, work)


def test_a_replica_does_not_go_to_a_cluster_of_somebody_else_that_has_the_name_now(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        places = ray_places(store, tmp_path)
        job = service().current.job
        bobs = replace(service(), user="bob", ray=RayPlace("ray", user="bob"))
        olgas = replace(service(), user="olga", ray=RayPlace("ray", user="ann"))  # an operator may use it
        anns = await store.ray_clusters.add(cluster(1))
        for mine in (replace(service(), ray=RayPlace("ray")), olgas):
            assert "secret" in dict((await places.replica(mine, job)).env).values()
        with pytest.raises(NotAllowed, match="the Ray cluster ray is ann's"):
            await places.replica(bobs, job)
        await store.ray_clusters.put(replace(anns, environment=PASSWORD))
        with pytest.raises(NotAllowed, match="has passwords of ann"):
            await places.replica(olgas, job)
        assert (await places.replica(olgas, replace(job, environment=PASSWORD))).environment == PASSWORD

    in_store(tmp_path, work)


def test_the_end_of_a_service_does_not_end_the_cluster_of_somebody_else_that_has_the_name_now(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        places = ray_places(store, tmp_path)
        own = RayPlace("ray", is_own=True, user="bob")
        bobs = replace(service(), user="bob", ray=own)
        anns = await store.ray_clusters.add(cluster(1))
        assert not await places.has_own(bobs)
        await places.stop_own(bobs)
        assert await store.ray_clusters.open() == [anns]
        mine = replace(bobs, user="ann")
        assert await places.has_own(mine)
        await places.stop_own(mine)
        assert [one.state for one in await store.ray_clusters.open()] == [ClusterState.STOPPING]

    in_store(tmp_path, work)
