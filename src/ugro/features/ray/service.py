"""Ray clusters: start, show, scale, stop; and the loop that brings their rows and their jobs together.

The row is written first. Jobs are submitted with keys that are made of the cluster's key and the worker's number, so
an agent that was killed at any moment goes on with the same jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ugro.features.environments.model import EnvRequest
from ugro.features.ray import rules as steps
from ugro.features.ray.config import RaySection
from ugro.features.ray.jobs import RaySettings, head_job, worker_job
from ugro.features.ray.model import Access, ClusterState, ClusterView, ClusterWish, RayCluster, Worker
from ugro.features.ray.operations import (
    ONLY,
    ClusterAccess,
    ClusterList,
    GetRayCluster,
    GetRayClusterAccess,
    ListRayClusters,
    OneCluster,
    ScaleRayCluster,
    StartProgress,
    StartRayCluster,
    StopRayCluster,
)
from ugro.features.ray.rules import Said, more_workers, said_in, to_drop, view_of
from ugro.features.ray.starting import Request, Starting, clean
from ugro.kernel.access.model import AuditEntry, Caller, account_of, node_of
from ugro.kernel.access.service import AuditLog
from ugro.kernel.config.kinds import BadValueError, Environment
from ugro.kernel.config.section import is_job_name
from ugro.kernel.files.results.job_folder import rank_log
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Needs as Lacking
from ugro.kernel.jobs.submission import Submit
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.diagnosis import LOOPBACK
from ugro.kernel.operations.audit_rules import READ_TOKEN
from ugro.kernel.operations.audit_trail import DONE, now
from ugro.kernel.operations.request import Needs, answers
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import ChangeSignal, wait_for_any
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, UsageError

_Said = StartProgress | OneCluster | Needs
log = logging.getLogger(__name__)

_LOOK_S = 1.0
_IDLE_S = 60.0
_GATHER_S = 0.05
_LOG_BYTES = 256 * 1024
_CLEAN_S = 10.0
_SAY_S = 0.1
_MOST_LISTED = 100
_MOST_WORKERS = 1000
_LONGEST_NAME = 48  # its jobs have longer ones
_LOG_LEVELS = {"critical": "fatal"}  # Ray's own word


class RayClusters:
    def __init__(
        self,
        jobs_folder: Path,
        store: Store,
        cluster: Cluster,
        jobs: JobService,
        starting: Starting,
        audit: AuditLog,
    ) -> None:
        self._folder = jobs_folder
        self._store = store.ray_clusters
        self._job_store = store.jobs
        self._cluster = cluster
        self._jobs = jobs
        self._starting = starting
        self._audit = audit
        self._open: dict[int, RayCluster] = {}
        self._changed = ChangeSignal()  # a row was written
        self._problems: dict[int, str] = {}  # what keeps clusters from going on
        self._writing = asyncio.Lock()
        self.preparing = asyncio.Lock()  # two that are prepared at once would choose the same ports

    # --- requests ------------------------------------------------------------------------------------------------

    @answers(StartRayCluster)
    async def start(self, asked: StartRayCluster, caller: Caller) -> AsyncGenerator[list[_Said]]:
        _check(asked.wish)
        self._jobs.expect_submittable()
        submit = Submit(caller.user, "", None, asked.fields, Path(asked.here), asked.env, as_options=True)
        environment = await self._jobs.environment(submit)
        if isinstance(environment, Lacking):
            return _needs(environment)
        return self._start(asked.wish, caller.user, environment)

    async def _start(
        self, wish: ClusterWish, user: str, environment: EnvRequest | None
    ) -> AsyncGenerator[list[_Said]]:
        said: list[str] = []
        self._expect_new(wish.name)
        work = asyncio.create_task(self._made(wish, user, environment, said), name=f"prepare cluster {wish.name}")
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_SAY_S)
                while said:
                    yield [StartProgress(said.pop(0))]
        finally:
            work.cancel()
        yield [OneCluster(await self.view(work.result()))]

    async def _made(
        self, wish: ClusterWish, user: str, environment: EnvRequest | None, said: list[str]
    ) -> RayCluster:
        async with self.preparing:
            prepared = await self.prepare(wish, user, environment, said.append)
            # To its end, also if the client leaves now: what is recorded must be known.
            return await asyncio.shield(self._add(prepared))

    async def prepare(
        self, wish: ClusterWish, user: str, environment: EnvRequest | None, say: Callable[[str], None]
    ) -> RayCluster:
        """Not recorded. The caller holds ``preparing`` until it is."""
        self._expect_new(wish.name)
        heads = [one.head for one in self._open.values()]
        used = {port for one in heads for port in (one.port, one.dashboard_port, one.client_port)}
        return await self._starting.prepare(Request(wish, user, environment, frozenset(used)), say)

    async def _add(self, cluster: RayCluster) -> RayCluster:
        made = await self._store.add(cluster)
        self.note(made)
        return made

    def _expect_new(self, name: str) -> None:
        if any(one.name == name for one in self._open.values()):
            raise NotAllowed(
                f"there is a Ray cluster {name} already",
                hint=f"see: ugro cluster status {name}; for another one: ugro cluster start --name NAME",
            )

    @answers(ListRayClusters)
    async def list_clusters(self, asked: ListRayClusters, caller: Caller) -> ClusterList:
        found = await self._store.newest(_MOST_LISTED) if asked.all else await self._store.open()
        return ClusterList(tuple([await self.view(one) for one in found]))

    @answers(GetRayCluster)
    async def get(self, asked: GetRayCluster, caller: Caller) -> OneCluster:
        return OneCluster(await self.view(await self.find(_name(asked.name))))

    @answers(GetRayClusterAccess)
    async def access(self, asked: GetRayClusterAccess, caller: Caller) -> ClusterAccess:
        found = await self.find(_name(asked.name), is_open=True)
        await self.expect_open_to(found, caller.user)
        if caller.user != found.user:  # who has read the token can act as the cluster's owner there from now on
            about = f"{found.name} of {found.user}"
            self._audit.note(AuditEntry(now(), caller.user, caller.via, READ_TOKEN, about, DONE))
        head, namespace = found.head, self._cluster.config.section(RaySection).namespace
        address = f"{head.address}:{head.port}"
        ports = head.dashboard_port, head.node, head.client_address
        return ClusterAccess(Access(found.name, address, found.token, namespace, *ports))

    async def expect_open_to(self, cluster: RayCluster, user: str) -> None:
        """Who uses it runs code as its user, which on their own account nobody else does. Raises NotAllowed."""
        if user != cluster.user and (self._starting.is_personal(cluster) or await self._was_placed_on_login(cluster)):
            text = f"the Ray cluster {cluster.name} runs in the account of {cluster.user}"
            raise NotAllowed(text, hint="start your own: ugro cluster start --name NAME")

    async def _was_placed_on_login(self, cluster: RayCluster) -> bool:
        """The configuration may have had accounts when its jobs started, and have none now."""
        placements = [job.placement for job in (await self._submitted(cluster)).values() if job.placement is not None]
        return any(account_of(name) for placement in placements for name in placement.nodes)

    @answers(StopRayCluster)
    async def stop(self, asked: StopRayCluster, caller: Caller) -> OneCluster:
        found = await self.find(_name(asked.name), is_open=True)
        return OneCluster(await self.view(await self._change(found, state=ClusterState.STOPPING)))

    @answers(ScaleRayCluster)
    async def scale(self, asked: ScaleRayCluster, caller: Caller) -> OneCluster:
        """Raises Unsatisfiable if no node has room."""
        wanted = asked.workers
        if not 0 <= wanted <= _MOST_WORKERS:
            raise UsageError(f"a cluster has 0 to {_MOST_WORKERS} workers", hint="ugro cluster scale 3")
        found = await self.find(_name(asked.name), is_open=True)
        jobs = await self._submitted(found)
        lost = tuple(worker for worker in found.workers if worker.number in jobs and jobs[worker.number].is_final)
        kept = tuple(worker for worker in found.workers if worker not in lost)
        gone = to_drop(kept, wanted)
        workers = tuple(worker for worker in kept if worker not in gone)
        if len(workers) < wanted:
            workers += await self._added(found, workers, wanted)
        async with self._writing:
            now = self._open.get(found.id)
            if now is None or now.state is not ClusterState.ACTIVE or now.workers != found.workers:
                raise NotAllowed(f"the Ray cluster {found.name} has changed meanwhile", hint="ugro cluster status")
            scaled = await self._put(replace(now, workers=workers, dropped=(*now.dropped, *lost, *gone)))
        return OneCluster(await self.view(scaled))

    async def _added(self, cluster: RayCluster, kept: Sequence[Worker], wanted: int) -> tuple[Worker, ...]:
        usable = await self._starting.usable(cluster.wish)
        places = await self._starting.places(usable)
        added = more_workers(cluster.wish, kept, places, wanted, cluster.next_number)
        await self._starting.expect_allowed(cluster.wish, [*kept, *added], cluster.user)
        pythons = await self._starting.more(cluster, list({worker.node for worker in added}))
        return tuple(replace(worker, python=pythons[worker.node]) for worker in added)

    # --- what is ---------------------------------------------------------------------------------------------------

    async def view(self, cluster: RayCluster) -> ClusterView:
        jobs = await self._submitted(cluster)
        shown = dict(zip(jobs, await self._jobs.with_reasons(list(jobs.values())), strict=True))
        said = await asyncio.to_thread(lambda: {number: self._said(job) for number, job in jobs.items()})
        found = view_of(cluster, shown, said)
        return replace(found, reason=self._problems.get(cluster.id) or found.reason)

    def _said(self, job: Job) -> Said:
        """Blocks."""
        if not job.attempt:
            return Said()
        try:
            with rank_log(self._folder / str(job.id), job.attempt, 0).open("rb") as file:
                begin = file.read(_LOG_BYTES)
                file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _LOG_BYTES))
                return said_in((begin + file.read(_LOG_BYTES)).decode("utf-8", "replace"))
        except OSError:
            return Said()

    async def _submitted(self, cluster: RayCluster) -> dict[int, Job]:
        numbers = [steps.HEAD, *(worker.number for worker in (*cluster.workers, *cluster.dropped))]
        found = {number: await self._job_store.submitted(_key(cluster, number)) for number in numbers}
        return {number: job for number, job in found.items() if job is not None}

    async def find(self, word: str | None, *, is_open: bool = False) -> RayCluster:
        """By name (one that has not ended, or else the newest), or by number; None: the only one that has not ended."""
        known = await self._store.open()
        if word is None:
            if len(known) == 1:
                return known[0]
            if known:
                names = ", ".join(one.name for one in known)
                raise UsageError(f"there are several Ray clusters: {names}", hint="name one of them")
            raise NotFound("there is no Ray cluster", hint="start one: ugro cluster start")
        everything = [*known, *await self._store.newest(_MOST_LISTED)]
        found = next((one for one in everything if word in (one.name, str(one.id))), None)  # no name is a number
        if found is None or (is_open and found.state is ClusterState.ENDED):
            name = word if found is None else found.name
            raise NotFound(f"there is no Ray cluster {name}", hint="see: ugro cluster status --all")
        return found

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        self._open = {one.id: one for one in await self._store.open()} | self._open
        while True:
            seen = {self._changed: self._changed.count, self._jobs.changed: self._jobs.changed.count}
            for cluster in list(self._open.values()):
                try:
                    await self._look(cluster.id)
                    self._problems.pop(cluster.id, None)
                except UgroError as error:
                    self._complain(cluster, error)
            if self._open:
                await asyncio.sleep(_GATHER_S)
                await wait_for_any(seen, _LOOK_S)
            else:
                await self._changed.wait(seen[self._changed], _IDLE_S)

    def _complain(self, cluster: RayCluster, error: UgroError) -> None:
        """Once, as long as it is the same: it is tried again every second."""
        if self._problems.get(cluster.id) != str(error):
            self._problems[cluster.id] = str(error)
            log.warning("the Ray cluster %s cannot go on now: %s", cluster.name, error)

    async def _look(self, number: int) -> None:
        cluster = self._open[number]
        jobs = await self._submitted(cluster)
        for step in steps.next_steps(cluster, jobs):
            await self._do(self._open[number], step, list(jobs.values()))

    async def _do(self, cluster: RayCluster, step: steps.Step, jobs: Sequence[Job]) -> None:
        ray = _settings(self._cluster)
        match step:
            case steps.Submit(None):
                await self._jobs.submit_made(head_job(cluster, ray), cluster.user, _key(cluster, steps.HEAD))
            case steps.Submit(worker):
                assert worker is not None
                key = _key(cluster, worker.number)
                await self._jobs.submit_made(worker_job(cluster, worker, ray), cluster.user, key)
            case steps.Cancel(job):
                await self._jobs.cancel(str(job))
            case steps.Stop(failure):
                await self._change(cluster, state=ClusterState.STOPPING, failure=failure)
            case steps.Close():
                await self._clean(cluster, jobs)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                await self._change(cluster, state=ClusterState.ENDED, ended_at=now)

    async def _clean(self, cluster: RayCluster, jobs: Sequence[Job]) -> None:
        """Killed ranks may have left files. A node that cannot be asked keeps them."""
        pythons = {worker.node: worker.python for worker in (*cluster.workers, *cluster.dropped)}
        pythons[cluster.head.node] = cluster.head.python
        used = {name for job in jobs if job.placement is not None for name in job.placement.nodes}
        for name in used:  # in the accounts that its jobs ran in
            if (node := node_of(name)) not in pythons:
                continue
            folder = cluster.head.state_folder if node == cluster.head.node else None
            with contextlib.suppress(UgroError):
                link = await self._cluster.inventory.get(name).ready(_CLEAN_S, patiently=True)
                await clean(link, pythons[node], cluster.key, folder)

    async def _change(
        self, cluster: RayCluster, state: ClusterState, failure: str | None = None, ended_at: str | None = None
    ) -> RayCluster:
        """States only go forward; the first failure counts."""
        async with self._writing:
            now = self._open.get(cluster.id, cluster)
            if list(ClusterState).index(state) <= list(ClusterState).index(now.state):
                return now
            changed = replace(now, state=state, failure=now.failure or failure, ended_at=ended_at)
            return await self._put(changed)

    async def _put(self, cluster: RayCluster) -> RayCluster:
        await self._store.put(cluster)
        self.note(cluster)
        return cluster

    def note(self, cluster: RayCluster) -> None:
        """It was recorded."""
        if cluster.state is ClusterState.ENDED:
            self._open.pop(cluster.id, None)
        else:
            self._open[cluster.id] = cluster
        self._changed.notify()


def _settings(cluster: Cluster) -> RaySettings:
    ray = cluster.config.section(RaySection)
    level = _LOG_LEVELS.get(ray.log_level, ray.log_level)
    return RaySettings("0.0.0.0" if ray.head_bind_all else LOOPBACK, level)


def _key(cluster: RayCluster, number: int) -> str:
    return f"ray-{cluster.key}-{number}"


def _name(word: str) -> str | None:
    return None if word == ONLY else word


async def _needs(lacking: Lacking) -> AsyncGenerator[list[_Said]]:
    yield [Needs(lacking.variables)]


def _check(wish: ClusterWish) -> None:
    if not is_job_name(wish.name) or len(wish.name) > _LONGEST_NAME or wish.name == ONLY:
        raise UsageError(
            f"not a cluster's name: {wish.name!r:.60}",
            hint=f"letters, digits, dots and dashes, at most {_LONGEST_NAME}",
        )
    if wish.workers_per_node < 1 or (wish.nodes is not None and wish.nodes < 1):
        raise UsageError("a cluster starts with at least one worker on one node", hint="ugro cluster start --nodes 3")
    try:
        Environment().parse(dict(wish.env))
    except BadValueError as error:
        raise UsageError(f"--env: {error.message}", hint=error.hint or "--env HF_HOME=/data/hf") from error
    if wish.size.cpus is not None and wish.size.cpus < 1:
        raise UsageError("a worker has at least one CPU", hint="--cpus 4")
