"""Requests about services, and the loop that drives those which have not ended."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

from ugro.features.services.model import ApiKey, Door, DoorPlace, KeyReport, Service, ServiceReport, ServiceState
from ugro.features.services.operations import (
    CreatedKey,
    CreateServiceKey,
    DecideUpdateOfService,
    GetService,
    KeyList,
    ListServiceKeys,
    ListServices,
    OneService,
    RevokedKey,
    RevokeServiceKey,
    ScaleService,
    ServiceList,
    StopService,
    WatchService,
)
from ugro.features.services.rules.report import report_of
from ugro.features.services.rules.rollout import decided, scaled, under_way, updated
from ugro.features.services.rules.steps import View
from ugro.features.services.service.creation import Creation, ServiceRequest, now
from ugro.features.services.service.door import DoorClient, door_job, over_link
from ugro.features.services.service.replicas import ReplicaWatch, door_key, door_settings
from ugro.features.services.service.runner import Runner
from ugro.kernel.access.caller import knows_values_of
from ugro.kernel.access.model import Caller, node_of
from ugro.kernel.files.results.log_stream import agent_stops
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Needs
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, Unreachable
from ugro.kernel.support.process import point

log = logging.getLogger(__name__)

_LOOK_S = 5.0
_IDLE_S = 600.0
_SHOW_S = 0.3
_MOST_LISTED = 100
_MOST_KEYS = 1000
_KEY_START = "ugro-"  # of an API key, so that people and scanners recognise one
_READY_S = 5.0


class Services:
    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        jobs: JobService,
        creation: Creation,
        watch: ReplicaWatch,
        speeds: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.services = store.services
        self.store = store.jobs
        self.jobs = jobs
        self.watch = watch
        self._speeds = speeds
        self.drained = store.drained
        self._cluster = cluster
        self._creation = creation
        self._runners: dict[int, Runner] = {}
        self._added = ChangeSignal()
        self.changed = ChangeSignal()  # what reports show
        self._preparing = asyncio.Lock()
        self._is_ending = False

    # --- requests ------------------------------------------------------------------------------------------------

    async def create(self, request: ServiceRequest) -> ServiceReport | Needs:
        if (known := await self.services.requested(request.submit.key)) is not None:
            return await self._report(known)
        self.jobs.expect_submittable()
        read = await self._creation.read(request)  # it may resolve packages, which takes minutes: others need not wait
        if isinstance(read, Needs):
            return read
        async with self._preparing:  # two that are prepared at once would choose the same port
            new = await self._creation.prepare(request, read)
            await self._refuse_port(new)
            made = await asyncio.shield(self._add(new))
        return await self._report(made)

    async def _add(self, new: Service) -> Service:
        made = await self.services.add(new)
        point("service.created")
        await self.store.note("service", f"service {made.name} was started by {made.user}: {made.current.source}")
        self._added.notify()
        return made

    async def _refuse_port(self, new: Service) -> None:
        for other in await self.services.open():  # its door may not listen yet
            if (other.door.node, other.spec.port) == (new.door.node, new.spec.port):
                raise NotAllowed(
                    f"port {new.spec.port} on {new.door.node} is that of the service {other.name}",
                    hint="choose another: --port PORT",
                )

    async def update(self, word: str, request: ServiceRequest, canary: float | None) -> ServiceReport | Needs:
        service = await self._active(word)
        _expect_own_values(service)
        if any(one.request_key == request.submit.key for one in service.revisions):
            return await self._report(service)
        if service.rollout is not None:
            raise under_way(service)
        made = await self._creation.next_revision(service, request)
        if isinstance(made, Needs):
            return made
        served = self._serving(service.id)
        changed = await self._change(service, lambda one: updated(one, made, canary, served, now()))
        point("service.updated")
        newest = changed.revisions[-1]
        await self.store.note("service", f"service {service.name}: update to revision {newest.number}: {newest.source}")
        return await self._report(changed)

    @answers(DecideUpdateOfService)
    async def decide(self, asked: DecideUpdateOfService, caller: Caller) -> OneService:
        service = await self._active(asked.name)
        changed = await self._change(service, lambda one: decided(one, promotes=asked.promotes))
        text = "promoted" if asked.promotes else "rolled back"
        await self.store.note("service", f"service {service.name}: the update was {text} by a person")
        return OneService(await self._report(changed))

    @answers(ScaleService)
    async def scale(self, asked: ScaleService, caller: Caller) -> OneService:
        service = await self._active(asked.name)
        runner = self._runners.get(service.id)
        seen = runner.view.seen if runner is not None else ()
        changed = await self._change(service, lambda one: scaled(one, asked.replicas, seen))
        await self.store.note("scaled", f"service {service.name}: {asked.replicas} replicas, by a person")
        return OneService(await self._report(changed))

    @answers(StopService)
    async def stop(self, asked: StopService, caller: Caller) -> OneService:
        service = await self.services.find(asked.name)
        if service.state is ServiceState.ACTIVE:
            service = await self._change(service, _stopping)
        return OneService(await self._report(service))

    # --- keys ----------------------------------------------------------------------------------------------------

    @answers(CreateServiceKey)
    async def create_key(self, asked: CreateServiceKey, caller: Caller) -> CreatedKey:
        service = await self._active(asked.name)
        name = service.name
        if not service.spec.needs_keys:
            raise NotAllowed(f"{name} answers without keys", hint="stop it, and serve it with --keys")
        if len(service.keys) >= _MOST_KEYS:
            raise NotAllowed(f"{name} has {_MOST_KEYS} keys, which is the most", hint="revoke some")
        secret = _KEY_START + secrets.token_urlsafe(32)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        made = ApiKey(secrets.token_hex(4), asked.label, digest, now())
        await self._change(service, lambda one: replace(one, keys=(*one.keys, made)))
        await self.store.note("service", f"service {name}: key {made.id} was created")
        return CreatedKey(KeyReport(made.id, made.label, made.made_at), secret)

    @answers(ListServiceKeys)
    async def keys(self, asked: ListServiceKeys, caller: Caller) -> KeyList:
        service = await self.services.find(asked.name)
        return KeyList(tuple(KeyReport(one.id, one.label, one.made_at) for one in service.keys))

    @answers(RevokeServiceKey)
    async def revoke_key(self, asked: RevokeServiceKey, caller: Caller) -> RevokedKey:
        service = await self._active(asked.name)
        name, key = service.name, asked.key
        if all(one.id != key for one in service.keys):
            raise NotFound(f"{name} has no key {key!r:.40}", hint=f"see: ugro serve key ls {name}")
        await self._change(service, lambda one: replace(one, keys=tuple(kept for kept in one.keys if kept.id != key)))
        await self.store.note("service", f"service {name}: key {key} was revoked")
        return RevokedKey()

    # --- what is -------------------------------------------------------------------------------------------------

    @answers(ListServices)
    async def list_services(self, asked: ListServices, caller: Caller) -> ServiceList:
        return ServiceList(tuple(await self.listed(everything=asked.all)))

    async def listed(self, *, everything: bool) -> list[ServiceReport]:
        found = await self.services.newest(_MOST_LISTED) if everything else await self.services.open()
        return [await self._report(one) for one in found]

    @answers(GetService)
    async def get_service(self, asked: GetService, caller: Caller) -> OneService:
        return OneService(await self.report(asked.name))

    async def report(self, word: str) -> ServiceReport:
        return await self._report(await self.services.find(word))

    @answers(WatchService)
    async def watch_service(self, asked: WatchService, caller: Caller) -> AsyncGenerator[list[ServiceReport]]:
        return self._watching((await self.services.find(asked.name)).id)

    async def _watching(self, number: int) -> AsyncGenerator[list[ServiceReport]]:
        while not self._is_ending:
            seen = self.changed.count
            found = await self._report(await self.services.get(number))
            yield [found]
            if found.is_over:
                return
            await asyncio.sleep(_SHOW_S)
            await self.changed.wait(seen, 1.0)
        raise agent_stops()

    def end_streams(self) -> None:
        self._is_ending = True
        self.changed.notify()

    async def _report(self, service: Service) -> ServiceReport:
        runner = self._runners.get(service.id)
        if runner is not None and service.state is not ServiceState.ENDED:
            return runner.report()
        return report_of(View(service))

    def _serving(self, number: int) -> int | None:
        """Returns None when nobody knows, because the door cannot be asked now."""
        runner = self._runners.get(number)
        if runner is None or runner.view.door.servers is None:
            return None
        return sum(one.is_serving for one in runner.view.live)

    async def _active(self, word: str) -> Service:
        service = await self.services.find(word)
        if service.state is not ServiceState.ACTIVE:
            raise NotAllowed(f"the service {service.name} is {service.state}", hint="see: ugro serve ls --all")
        return service

    async def _change(self, service: Service, how: Callable[[Service], Service]) -> Service:
        runner = self._runners.get(service.id)
        if runner is not None:
            return await runner.change(how)
        return await self.services.change(service.id, how)

    # --- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        self._runners.clear()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    seen = self._added.count
                    for service in await self.services.open():
                        if service.id not in self._runners:
                            runner = self._runners[service.id] = Runner(self, service, self.changed.notify)
                            group.create_task(self._drive(runner), name=f"drive service {service.name}")
                    await self._added.wait(seen, _IDLE_S)
        finally:
            self.watch.close()

    async def _drive(self, runner: Runner) -> None:
        """Until it has ended; a bug that ends it is logged, and it goes on."""
        while runner.service.state is not ServiceState.ENDED:
            task = asyncio.create_task(runner.run(), name=f"run service {runner.service.name}")
            try:
                await asyncio.wait([task])
            finally:
                task.cancel()
            if (bug := task.exception()) is not None:
                log.error("the service %s is driven again", runner.service.name, exc_info=bug)
                await asyncio.sleep(_LOOK_S)
        self._runners.pop(runner.service.id, None)
        self.changed.notify()

    # --- for the runners -----------------------------------------------------------------------------------------

    def door(self, service: Service, job: Job) -> Door:
        # In the account of its user, where nodes have such.
        node = self._cluster.inventory.get(job.placement.nodes[0] if job.placement else service.door.node)
        return DoorClient(over_link(node, self.watch.identity, job.id, job.attempt, ready_s=_READY_S), service.name)

    def speed(self, node: str) -> float | None:
        return self._speeds().get(node)

    def is_beside_door(self, service: Service, node: str) -> bool:
        """On the same machine."""
        if service.door.node == node_of(node):
            return True
        found = [self._cluster.inventory.find(name) for name in (service.door.node, node)]
        boots = [one.machine.boot_id if one is not None and one.machine is not None else None for one in found]
        return boots[0] is not None and boots[0] == boots[1]

    async def door_address(self, service: Service) -> str:
        """For the next replica; the old one if no other is found. Raises Unreachable if its node is away."""
        try:
            return await self._creation.door_address(service)
        except Unreachable:
            raise
        except UgroError as error:
            log.warning("service %s: its door keeps its address: %s", service.name, error)
            return service.door.address

    async def next_door(self, service: Service, *, has_failed: bool) -> DoorPlace:
        return await self._creation.next_door(service, has_failed=has_failed)

    async def submit_door(self, service: Service) -> None:
        node = self._cluster.inventory.get(service.door.node).spec
        # The agent's own machine is lost with the agent, which alone could start another door.
        lease_s = None if node.transport == "local" else service.spec.door_lost_after_s
        spec = door_job(door_settings(service), service.door.node, secret=service.secret, lease_s=lease_s)
        spec = replace(spec, priority=max(spec.priority, service.current.job.priority))
        await self.jobs.submit_made(spec, service.user, door_key(service), is_exempt=True)


def _expect_own_values(service: Service) -> None:
    """A new command would run with its variables, in the account of its user."""
    if not knows_values_of(service.user):
        raise NotAllowed(
            f"the service {service.name} runs with variables of {service.user}, which are not yours to use",
            hint="its user can update it; an operator can scale and stop it, and decide about an update",
        )


def _stopping(service: Service) -> Service:
    if service.state is not ServiceState.ACTIVE:
        return service
    return replace(service, state=ServiceState.STOPPING, rollout=None)
