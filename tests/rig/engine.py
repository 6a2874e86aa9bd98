"""An engine with all it needs, as an agent would make it, on nodes of this machine whose cable a test can pull."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.rig.stores import store_at
from tests.rig.waiting import processes_with, processes_with_variable, signal_all, wait_until
from ugro.features.power.owners import owners_of
from ugro.kernel.agent.clock import Clock
from ugro.kernel.files.code.service import Code
from ugro.kernel.files.results.checkpoints import CheckpointSync
from ugro.kernel.files.results.collector import Collector, checkpoint_env
from ugro.kernel.files.results.log_mirror import LogMirror, SmallLogs
from ugro.kernel.files.results.output_sync import OutputSync
from ugro.kernel.jobs.engine.launch import Hardware, Planner
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.engine.placed_runs import PlacedRuns
from ugro.kernel.jobs.engine.reconciler import Engine, Knowledge
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput, Standings
from ugro.kernel.jobs.model import Disconnect, Ending, Job, JobSpec, JobState, OnLost, Retry, Stop
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity
from ugro.kernel.links.reports import HealthCheck, NodeNotes
from ugro.kernel.store.database import Store
from ugro.kernel.support.state_dir import StateDir
from ugro.node.durable import Numbers

_LIMIT_S = 60
SOON_S = 20
KEY = bytes(range(32))  # the agent's


class Pause:
    """Something waits at a certain point until it is let go."""

    def __init__(self) -> None:
        self._is_reached = asyncio.Event()
        self.is_over = asyncio.Event()

    async def __call__(self) -> None:
        self._is_reached.set()
        async with asyncio.timeout(SOON_S):
            await self.is_over.wait()

    async def reached(self) -> None:
        async with asyncio.timeout(SOON_S):
            await self._is_reached.wait()


class EngineRig:
    watch_type = RunTracker
    scheduler_input_type = SchedulerInput
    results_type = OutputSync
    checkpoints_type = CheckpointSync

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self._gate = folder / "gate.sh"
        self._gate.write_text('[ -e "$1" ] && exit 9\nwhile [ -e "$1.slow" ]; do sleep 0.05; done\nshift\nexec "$@"\n')
        self.file = folder / "cluster.yaml"
        self.cluster: Cluster | None = None
        self._roots = {name: name for name in self.names}
        self._write()

    def _write(self) -> None:
        entries = [f"  {name}: {self._entry(name, root)}\n" for name, root in self._roots.items()]
        self.file.write_text("nodes:\n" + "".join(entries))

    def _entry(self, name: str, root: str) -> str:
        return f"{{transport: [sh, {self._gate}, {self._cut(name)}], remote_root: {self.folder}/{root}}}"

    async def lead_to(self, name: str, root: str) -> None:
        """The node's name leads to another folder now, as after an edit of the cluster file."""
        assert self.cluster is not None
        self._roots[name] = root
        self._write()
        await self.cluster.look_again()

    def _cut(self, name: str) -> Path:
        return self.folder / f"{name}.cut"

    def cut(self, name: str) -> None:
        """From now on nothing reaches the node; what runs there goes on."""
        assert self.cluster is not None
        self._cut(name).touch()
        if (link := self.cluster.inventory.get(name).link) is not None:
            link.close()

    def slow(self, name: str) -> Path:
        """As long as this file is there, connecting to the node takes its time."""
        return self.folder / f"{name}.cut.slow"

    def heal(self, name: str) -> None:
        self._cut(name).unlink()

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[tuple[Store, Engine]]:
        store = store_at(self.folder / "state.db")
        await store.open()
        self.cluster = cluster = Cluster(self.file)
        await cluster.start()
        identity = Identity(await store.agent_id(), await store.next_generation(), KEY)
        standings = Standings(Clock(), owners_of(cluster, store.jobs))
        live = LiveJobs(store.jobs, standings.clock.reading)
        watch = self.watch = self.watch_type(cluster.inventory, identity, PlacedRuns(store.jobs, live.get))
        health = HealthCheck(cluster, store, NodeNotes(owner=standings.owners.report))
        scheduler_input = self.scheduler_input = self.scheduler_input_type(store.jobs, cluster, health, standings)
        logs = SmallLogs(store.jobs, LogMirror(self.folder / "jobs", watch))
        checkpoints = self.checkpoints_type(self.folder / "jobs", cluster.inventory.get, identity)
        hardware = Hardware(scheduler_input.facts)
        planner = Planner(cluster, watch, checkpoint_env(checkpoints), hardware, scheduler_input.modules)
        code = self.code = Code(StateDir(self.folder / "home"), store, cluster, identity)
        results = self.results_type(self.folder / "jobs", cluster.inventory.get, identity)
        home = self.home = Collector(store.jobs, watch, logs, checkpoints, results)
        engine = Engine(store.jobs, Knowledge.of(store.jobs, live, watch), planner, code, scheduler_input, home)
        task = asyncio.create_task(engine.run())
        try:
            yield store, engine
        finally:
            task.cancel()
            await asyncio.wait([task])
            await engine.close()
            await cluster.inventory.close()
            await store.close()

    async def log(self, job: Job, rank: int = 0) -> str:
        """As somebody reads it while the agent runs."""
        await self.home.show_logs(job.id)
        return (self.folder / "jobs" / str(job.id) / f"attempt_{job.attempt}" / "logs" / f"rank_{rank}.log").read_text()

    def processes(self, attempt: int | None = None) -> list[int]:
        """What this rig's jobs run; not their supervisors, which may be forks that show another's variables."""
        found = processes_with(os.fsencode(f"UGRO_RUN_DIR={self.folder}/"))
        if attempt is not None:
            found = sorted(set(found) & set(processes_with_variable("UGRO_ATTEMPT", [str(attempt)])))
        return found

    def end(self) -> None:
        signal_all(signal.SIGKILL, self.processes())

    def lease_from_s(self, node: str) -> float:
        """The instant, by the node's own clock, that the leases of its runs count from; 0 before the first renewal."""
        files = list(self.folder.glob(f"{node}/.ugro/agents/*/lease"))
        return Numbers(str(files[0]), 2).read()[1] / 1000 if files else 0.0

    def set_generation(self, node: str, generation: int) -> None:
        """The node claims to have met that generation of the agent."""
        [file] = self.folder.glob(f"{node}/.ugro/agents/*/generation")
        Numbers(str(file), 1).write(generation)

    def run_folders(self, node: str) -> list[str]:
        return [path.name for path in self.folder.glob(f"{node}/.ugro/agents/*/runs/*")]


def command(*argv: str, name: str = "job", retries: int = 0) -> JobSpec:
    return JobSpec(name=name, argv=argv, retry=Retry(max_retries=retries))


async def until(store: Store, job: Job, is_so: Callable[[Job], bool]) -> Job:
    async with asyncio.timeout(_LIMIT_S):
        while not is_so(job := await store.jobs.get(job.id)):  # noqa: ASYNC110  # a row in a database tells nobody
            await asyncio.sleep(0.05)
    return job


def is_final(job: Job) -> bool:
    return job.is_final


def in_loop(work: Awaitable[None]) -> None:
    async def run() -> None:
        await work

    asyncio.run(run())


def gated(gate: Path) -> str:
    return f"until [ -e {gate} ]; do sleep 0.05; done"


def leased(lease_s: float, *argv: str) -> JobSpec:
    disconnect = Disconnect(lost_after_s=lease_s, on_lost=OnLost.RESTART)
    return JobSpec("leased", argv, disconnect=disconnect, stop=Stop(grace_s=0.5))


async def submitted(store: Store, engine: Engine, spec: JobSpec, key: str = "k") -> Job:
    async with asyncio.timeout(SOON_S):
        job = (await store.jobs.submit(spec, "ann", key)).job
    engine.wake()
    return job


async def soon(store: Store, job: Job, is_so: Callable[[Job], bool]) -> Job:
    async with asyncio.timeout(SOON_S):
        return await until(store, job, is_so)


async def running(store: Store, job: Job) -> tuple[Job, str]:
    """The job and its node."""
    job = await soon(store, job, lambda seen: seen.state is JobState.RUNNING)
    assert job.placement is not None
    return job, job.placement.nodes[0]


async def seen_soon(predicate: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_until, predicate, SOON_S, what)


async def renewed(rig: EngineRig, node: str, lease_s: float) -> None:
    """Returns when leases were renewed for so long that without renewals they would be over."""
    begun_s = rig.lease_from_s(node)
    await seen_soon(lambda: rig.lease_from_s(node) > begun_s + 2 * lease_s, f"the leases on {node} to be renewed")


async def asked_to_end(store: Store, engine: Engine, job: Job, ending: Ending = Ending.CANCELLED) -> None:
    await store.jobs.ask_to_end(job.id, ending)
    engine.wake()
