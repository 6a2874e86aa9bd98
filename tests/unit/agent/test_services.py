from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.stores import in_store, store_at
from tests.unit.policy.serving.places import service
from ugro.features.services.model import Service
from ugro.features.services.service.creation import ServiceRequest
from ugro.features.services.service.service import Services
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.submission import Submit
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotAllowed


class Nobody:
    """In the place of jobs, nodes and what makes services of requests."""

    def expect_submittable(self) -> None: ...

    async def with_reasons(self, jobs: list[Job]) -> list[Job]:
        return jobs

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def read(self, request: ServiceRequest) -> None:
        if request.submit.key == "slow":
            await self.may_read.wait()

    async def prepare(self, request: ServiceRequest, read: None) -> Service:
        made, key = service(), request.submit.key
        return replace(made, request_key=key, spec=replace(made.spec, name=key))


def test_two_services_do_not_get_one_port_although_neither_listens_yet(tmp_path: Path) -> None:
    async def run() -> None:
        store = store_at(tmp_path / "state.db")
        await store.open()
        try:
            nobody: Any = Nobody()
            services = Services(store, nobody, nobody, nobody, nobody)
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
        services = Services(store, nobody, nobody, nobody, nobody)
        slow = asyncio.create_task(services.create(ServiceRequest(Submit("ann", "slow"))))
        async with asyncio.timeout(20):
            await services.create(ServiceRequest(Submit("bob", "one")))
            nobody.may_read.set()
            with pytest.raises(NotAllowed, match="is that of the service one"):
                await slow

    in_store(tmp_path, work)
