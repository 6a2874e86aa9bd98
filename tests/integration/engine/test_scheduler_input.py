"""What the scheduler is shown of real node programs: at once, whoever is slow, and with GPUs that are truly free."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.model import ALL_GPUS, ANY_GPUS, Job, JobSpec, JobState, Launcher, Placement, Resources, Share
from ugro.kernel.jobs.scheduling.model import ClusterView, Decision, NodeView, Start
from ugro.kernel.jobs.scheduling.scheduler import schedule
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.reports import HealthCheck
from ugro.kernel.store.database import Store
from ugro.kernel.support.errors import NotAllowed
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

_LIMIT_S = 30
_SILENT = "{transport: [sh, -c, 'exec sleep 60', sh]}"


@dataclass
class World:
    store: Store
    cluster: Cluster
    scheduler_input: SchedulerInput

    async def take(self) -> ClusterView:
        live = LiveJobs(self.store.jobs, self.scheduler_input.clock.reading)
        await live.read()
        view = await self.scheduler_input.take(live)
        return replace(view, waiting=tuple(live.queue), ended=live.queue.outcomes)

    async def view(self, name: str) -> NodeView:
        return next(node for node in (await self.take()).nodes if node.name == name)

    async def until(self, name: str, is_so: Callable[[NodeView], bool]) -> NodeView:
        deadline = time.monotonic() + _LIMIT_S
        while not is_so(view := await self.view(name)):
            assert time.monotonic() < deadline, f"last seen: {view}"
            await asyncio.sleep(0.05)
        return view

    async def submit(self, resources: Resources, launcher: Launcher = Launcher.DDP) -> Job:
        newest = await self.store.jobs.newest(1)
        spec = JobSpec("job", ("x",), launcher, resources=resources)
        return (await self.store.jobs.submit(spec, "ann", str(len(newest) and newest[0].id))).job


def local(folder: Path, name: str, env: str = "{}") -> str:
    return f"  {name}: {{transport: local, remote_root: {folder}/{name}, env: {env}}}\n"


@asynccontextmanager
async def world(folder: Path, nodes: str, *, connect_timeout: float = 10) -> AsyncIterator[World]:
    file = folder / "cluster.yaml"
    file.write_text(f"ssh: {{connect_timeout: {connect_timeout}}}\nnodes:\n{nodes}")
    store = Store(folder / "state.db")
    await store.open()
    cluster = Cluster(file)
    await cluster.start()
    scheduler_input = SchedulerInput(store.jobs, cluster, HealthCheck(cluster, store))
    try:
        yield World(store, cluster, scheduler_input)
    finally:
        await scheduler_input.close()
        await cluster.inventory.close()
        await store.close()


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(work)


def gpu_env(folder: Path, library: Path, name: str, *gpus: SimulatedGpu) -> str:
    write_gpus(folder / f"{name}.gpus", gpus)
    return f"{{UGRO_NVML_LIBRARY: {library}, UGRO_PRETEND_GPUS: {folder}/{name}.gpus}}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("not installed: a C compiler")
    return build_nvml_stub(tmp_path_factory.mktemp("nvml"))


def starts(decisions: list[Decision]) -> list[Placement]:
    return [one.placement for one in decisions if isinstance(one, Start)]


def test_a_silent_node_delays_no_snapshot(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path, local(tmp_path, "n1") + f"  silent: {_SILENT}\n", connect_timeout=0.5) as here:
            silent = await here.view("silent")
            assert (silent.unusable, silent.is_known, silent.is_awaited) == ("has not answered yet", False, True)
            await here.until("n1", lambda view: view.unusable is None)
            began = time.monotonic()
            for _ in range(20):
                await here.take()
            assert time.monotonic() - began < 5, "20 times its timeout would be 10 s"
            silent = await here.until("silent", lambda view: view.unusable == "is unreachable")
            assert (silent.is_known, silent.is_awaited) == (False, True), "it may answer when it is dialled again"

    run(work())


def test_a_node_that_is_held_takes_no_jobs_until_it_is_let_go(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path, local(tmp_path, "n1")) as here:
            await here.until("n1", lambda view: view.unusable is None)
            holds, heard = here.scheduler_input.holds, list[str]()
            here.scheduler_input.listen(lambda: heard.append("news"))
            with holds.hold(["n1"], "is being measured"):
                assert len(heard) == 1, "the scheduler hears of it"
                assert (await here.view("n1")).unusable == "is being measured"
                with pytest.raises(NotAllowed), holds.hold(["n2", "n1"], "is being measured"):
                    pass
                assert holds.reason("n2") is None, "all of them or none"
                heard.clear()
            assert len(heard) == 1, "the scheduler hears of its end, too"
            assert (await here.view("n1")).unusable is None

    run(work())


def test_a_launch_counts_the_gpus_that_are_there_now(tmp_path: Path, library: Path) -> None:
    """An idle cluster is probed once a minute, and a GPU may vanish meanwhile."""

    async def work() -> None:
        nodes = local(tmp_path, "gpu", gpu_env(tmp_path, library, "gpu", SimulatedGpu(), SimulatedGpu()))
        async with world(tmp_path, nodes) as here:
            here.scheduler_input.reports.pace = lambda node: 3600.0
            await here.until("gpu", lambda view: len(view.gpus) == 2)
            write_gpus(tmp_path / "gpu.gpus", [SimulatedGpu()])
            both = JobSpec("job", ("x",), Launcher.DDP, resources=Resources(gpus_per_node=2))
            deadline = time.monotonic() + _LIMIT_S
            while len((await here.view("gpu")).gpus) == 2:  # a report of this very moment is not asked for again
                assert time.monotonic() < deadline
                await here.scheduler_input.refresh_gpus([both])
                await asyncio.sleep(0.05)
            misfit = await here.scheduler_input.misfit(both)
            assert misfit is not None
            [event] = [one for one in await here.store.jobs.events() if one.kind == "gpu"]
            assert (event.node, event.text.partition(" vanished; ")[2]) == ("gpu", "it has 1 GPU now")
            await here.submit(Resources(gpus_per_node=ALL_GPUS))
            [placement] = starts(schedule(await here.take()))
            assert placement.shares[0].gpus == (0,)

    run(work())


def test_what_fits_no_known_node_is_refused_only_when_none_is_unknown(tmp_path: Path) -> None:
    small, large = JobSpec("a", ("x",)), JobSpec("b", ("x",), resources=Resources(cpus=90_000))

    async def work() -> None:
        async with world(tmp_path, local(tmp_path, "n1") + local(tmp_path, "n2")) as here:
            misfit = await here.scheduler_input.misfit(large)
            assert misfit is not None, "it waited for their first answers"
            assert misfit.reason.startswith("no node has 90000 cores")
            assert await here.scheduler_input.misfit(small) is None
        async with world(tmp_path, local(tmp_path, "n1") + f"  silent: {_SILENT}\n", connect_timeout=0.5) as here:
            assert await here.scheduler_input.misfit(large) is None

    run(work())


def test_a_drain_counts_at_once_and_so_does_a_lost_link_until_it_is_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with world(tmp_path, local(tmp_path, "n1")) as here:
            await here.until("n1", lambda view: view.unusable is None)
            await here.store.drain("n1", "new fans")
            assert (await here.view("n1")).unusable == "is drained: new fans"
            await here.store.resume("n1")
            assert (await here.view("n1")).unusable is None
            node = here.cluster.inventory.get("n1")
            assert node.link is not None
            node.link.close()
            lost = await here.until("n1", lambda view: view.unusable is not None)
            assert (lost.unusable, lost.is_known) == ("is unreachable", True)
            assert lost.cores == os.cpu_count()
            await here.until("n1", lambda view: view.unusable is None)

    run(work())


def test_gpus_are_used_without_asking_and_foreign_use_counts_as_taken(tmp_path: Path, library: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    busy = gpu_env(tmp_path, library, "gpu", SimulatedGpu(), SimulatedGpu(processes=((other.pid, 5),)))

    async def work() -> None:
        async with world(tmp_path, local(tmp_path, "cpu") + local(tmp_path, "gpu", busy)) as here:
            await here.scheduler_input.first_answers()
            gpus = (await here.view("gpu")).gpus
            assert [gpu.is_foreign for gpu in gpus] == [False, True]
            await here.submit(Resources(gpus_per_node=ANY_GPUS))
            expected = Share("gpu", (0,), cpus=1, uuids=(gpus[0].uuid,))
            assert starts(schedule(await here.take())) == [Placement((expected,))]

    try:
        run(work())
    finally:
        other.communicate(b"\n", timeout=10)


@pytest.mark.proof
def test_a_gpu_that_our_own_job_uses_is_not_foreign(tmp_path: Path, library: Path) -> None:
    env = gpu_env(tmp_path, library, "gpu", SimulatedGpu())

    async def work() -> None:
        async with world(tmp_path, local(tmp_path, "gpu", env)) as here:
            await here.scheduler_input.first_answers()
            job = await here.submit(Resources(gpus_per_node=1))
            placement = Placement((Share("gpu", (0,), cpus=1),))
            job = await here.store.jobs.start(job, placement, "free")
            with_mark = {**os.environ, "UGRO_JOB": str(job.id)}
            rank = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "input()", stdin=subprocess.PIPE, env=with_mark
            )
            try:
                write_gpus(tmp_path / "gpu.gpus", [SimulatedGpu(memory_used_bytes=2**30, processes=((rank.pid, 5),))])
                shown = await here.until("gpu", lambda view: view.cost > 0.2)
                assert [gpu.is_foreign for gpu in shown.gpus] == [False]
                job = await here.store.jobs.move(job, JobState.STOPPING, "over")
                await here.store.jobs.move(job, JobState.SUCCEEDED, "over")
                assert not (await here.view("gpu")).gpus[0].is_foreign, "the report is older than the job's end"
                await here.until("gpu", lambda view: view.gpus[0].is_foreign)
            finally:
                await asyncio.wait_for(rank.communicate(b"\n"), 10)

    run(work())


def test_a_launch_right_after_the_start_waits_for_nodes_that_may_have_gpus(tmp_path: Path, library: Path) -> None:
    env = gpu_env(tmp_path, library, "gpu", SimulatedGpu())

    async def work() -> None:
        async with world(tmp_path, local(tmp_path, "cpu") + local(tmp_path, "gpu", env)) as here:
            await here.submit(Resources(gpus_per_node=ANY_GPUS))
            given: list[Placement] = []
            async with asyncio.timeout(_LIMIT_S):
                while not given:
                    given = starts(schedule(await here.take()))
                    await asyncio.sleep(0.005)
            [gpu] = (await here.view("gpu")).gpus
            assert given == [Placement((Share("gpu", (0,), cpus=1, uuids=(gpu.uuid,)),))]

    run(work())
