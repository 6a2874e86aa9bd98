"""How long one pass of the scheduler takes on a simulated cluster. Pure computing: no node, no agent, no disk.

    python -m bench scheduler

``results`` gives the figures, ``measure`` the same as a table to print. There is no peer to compare with.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ugro.kernel.jobs.model import ALL_GPUS, JobSpec, Launcher, Resources
from ugro.kernel.jobs.scheduling.model import ClusterView, GpuView, Holding, NodeView, Start, Waiting
from ugro.kernel.jobs.scheduling.scheduler import schedule
from ugro.kernel.jobs.scheduling.why import why

GIB = 2**30
NODES = 1000
JOBS = 10_000
_REPEATS = 5
_NOW = 1_000_000.0

# GPUs, memory of each, model, cores.
_MAKES = (
    (8, 80 * GIB, "H100", 128),
    (4, 24 * GIB, "RTX 4090", 32),
    (2, 12 * GIB, "RTX 5070 Ti", 16),
    (1, 8 * GIB, "RTX 4070", 8),
    (0, 0, "", 11),
)
_DEMANDS = (
    *(Resources(gpus_per_node=count) for count in (1, 2, 4, 8)),
    *(Resources(gpus_per_node=1, gpu_memory_bytes=size * GIB) for size in (2, 10, 20, 40)),
    *(Resources(min_nodes=count, max_nodes=count, gpus_per_node=1) for count in (2, 4, 8, 16, 64)),
    *(Resources(min_nodes=count, max_nodes=2 * count, gpus_per_node=ALL_GPUS) for count in (1, 2, 4)),
    *(Resources(gpus_per_node=1, gpu_models=(model,)) for model in ("H100", "4090", "5070")),
    *(Resources(cpus=count, memory_bytes=count * 2 * GIB) for count in (2, 8, 32)),
    Resources(),
    Resources(any_of=(Resources(gpus_per_node=8), Resources(min_nodes=4, max_nodes=4, gpus_per_node=2))),
)


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    median_s: float
    started: int


def cluster(nodes: int = NODES, *, seed: int = 1) -> tuple[NodeView, ...]:
    chance = random.Random(seed)
    return tuple(_node(index, chance) for index in range(nodes))


def jobs(count: int = JOBS, *, seed: int = 2, demands: tuple[Resources, ...] = _DEMANDS) -> tuple[Waiting, ...]:
    chance = random.Random(seed)
    return tuple(_job(index, chance, demands) for index in range(1, count + 1))


def running(snapshot: ClusterView) -> ClusterView:
    """The same cluster when nothing more fits; the queue is as long as before."""
    waiting = snapshot.waiting
    # Without those that take one core: they would fill every node, and nobody would hold much.
    jobs_by_id = {job.id: job for job in waiting if job.spec.resources != Resources() or len(snapshot.nodes) < NODES}
    snapshot = replace(snapshot, waiting=tuple(jobs_by_id.values()))
    while starts := [decision for decision in schedule(snapshot) if isinstance(decision, Start)]:
        first_id = -1 - len(snapshot.holding)
        holding = [_holding(first_id - turn, jobs_by_id[start.job], start) for turn, start in enumerate(starts)]
        snapshot = replace(snapshot, holding=(*snapshot.holding, *holding))
    return replace(snapshot, waiting=waiting)


def without(snapshot: ClusterView, share: float) -> ClusterView:
    """Some of the running jobs have ended."""
    chance = random.Random(3)
    return replace(snapshot, holding=tuple(one for one in snapshot.holding if chance.random() > share))


def many_demands(count: int) -> tuple[Resources, ...]:
    """So many different ones that hardly any two jobs are alike."""
    chance = random.Random(4)
    return tuple(
        replace(chance.choice(_DEMANDS[:-1]), cpus=chance.randint(0, 16), memory_bytes=chance.randint(0, 64) * GIB)
        for _ in range(count)
    )


def few_nodes() -> ClusterView:
    """What a small cluster has to do whenever one of many small jobs ends."""
    nodes = tuple(NodeView(f"node{index}", 8, 32 * GIB) for index in range(3))
    spec = JobSpec("small", ("true",))
    return ClusterView(_NOW, nodes, tuple(Waiting(number, "ann", spec, _NOW) for number in range(1, 1001)))


def measure() -> str:
    lines = [f"One pass over {JOBS:,} waiting jobs on {NODES:,} nodes, CPU time, median of {_REPEATS}", ""]
    lines += [f"{'':36}{'milliseconds':>14}{'jobs started':>14}"]
    lines += [f"{result.name:36}{result.median_s * 1000:14.1f}{result.started:14,}" for result in results()]
    return "\n".join(lines)


def results() -> list[Result]:
    idle = ClusterView(_NOW, cluster(), jobs())
    full = running(idle)
    some = without(full, 0.1)
    varied = replace(some, waiting=jobs(demands=many_demands(1000)))
    last = full.waiting[-1].id
    small = few_nodes()
    small_full = running(small)
    return [
        _measured("all nodes busy", lambda: schedule(full), full),
        _measured("one in ten jobs has ended", lambda: schedule(some), some),
        _measured("the same, 1,000 different demands", lambda: schedule(varied), varied),
        _measured("all nodes idle", lambda: schedule(idle), idle),
        _measured("half as many jobs, all nodes busy", *_halved(full)),
        _measured("why, for the last in the queue", lambda: why(full, last), full),
        _measured("1,000 small jobs, 3 nodes, all busy", lambda: schedule(small_full), small_full),
        _measured("1,000 small jobs, 3 nodes, all idle", lambda: schedule(small), small),
    ]


def _halved(snapshot: ClusterView) -> tuple[Callable[[], object], ClusterView]:
    half = replace(snapshot, waiting=snapshot.waiting[: len(snapshot.waiting) // 2])
    return (lambda: schedule(half)), half


def _measured(name: str, run: Callable[[], object], snapshot: ClusterView) -> Result:
    seconds = []
    for _ in range(_REPEATS):
        gc.collect()
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    starts = sum(isinstance(decision, Start) for decision in schedule(snapshot))
    return Result(name, statistics.median(seconds), starts)


def _node(index: int, chance: random.Random) -> NodeView:
    count, memory, model, cores = chance.choice(_MAKES)
    gpus = tuple(GpuView(position, model, memory) for position in range(count))
    speed = round(chance.uniform(0.25, 1.0), 2)
    return NodeView(f"node{index:04}", cores, cores * 4 * GIB, gpus, speed=speed, group=f"rack{index % 20}")


def _job(index: int, chance: random.Random, demands: tuple[Resources, ...]) -> Waiting:
    resources = chance.choice(demands)
    launcher = Launcher.DDP if resources.max_nodes > 1 or resources.any_of else Launcher.COMMAND
    spec = JobSpec(
        f"job{index}", ("train",), launcher, resources=resources, priority=chance.choice((10, 50, 50, 50, 90)),
        time_limit_s=chance.choice((None, 600.0, 3600.0)), is_preemptible=chance.random() < 0.2,
    )  # fmt: skip
    return Waiting(index, f"user{chance.randrange(12)}", spec, _NOW - chance.uniform(0, 7200))


def _holding(number: int, job: Waiting, start: Start) -> Holding:
    return Holding(
        number, job.user, job.spec.priority, start.placement, job.submitted_at, started_at=_NOW - job.id % 600,
        time_limit_s=job.spec.time_limit_s, is_preemptible=job.spec.is_preemptible,
    )  # fmt: skip


if __name__ == "__main__":
    print(measure())
