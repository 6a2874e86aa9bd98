"""A Ray cluster as users see it, from its row, its jobs and what its ranks have said in their logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ugro.core.job import Job, JobState
from ugro.core.ray_cluster import (
    ClusterState,
    ClusterView,
    Part,
    Phase,
    RayCluster,
    Worker,
    head_title,
    worker_title,
)
from ugro.core.support.loopback import is_loopback
from ugro.policy.ray.steps import HEAD
from ugro.policy.wording import count_of
from ugro.remote import foreign

_READY = "ugro: ready"
_NODES = "ugro: nodes "
_OURS, _WAITS = "ugro: ", ("waiting for ", "starting for ")
_LONGEST_WAIT = 300
_MOST_NODES = 10_000


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank's newest attempt has said."""

    is_ready: bool = False
    alive: frozenset[str] | None = None  # by a head: the nodes that Ray counts as alive
    waits: str = ""  # the last line, if it says what the rank waits for


def said_in(log: str) -> Said:
    """A node may write anything: a line that cannot be read is passed over."""
    is_ready, alive, waits = False, None, ""
    for line in log.splitlines():
        if line.strip() == _READY:
            is_ready = True
        elif line.startswith(_NODES):
            alive = _alive(line.removeprefix(_NODES)) or alive
        if line.startswith(_OURS):
            text = line.removeprefix(_OURS)[:_LONGEST_WAIT]
            waits = text if text.startswith(_WAITS) else ""
    return Said(is_ready, alive, waits)


def _alive(text: str) -> frozenset[str] | None:
    try:
        found = foreign.parsed(text)
        return frozenset(str(name) for name in found["alive"][:_MOST_NODES])
    except (ValueError, KeyError, TypeError):
        return None


def view_of(cluster: RayCluster, jobs: Mapping[int, Job], said: Mapping[int, Said]) -> ClusterView:
    alive = said.get(HEAD, Said()).alive
    head = _head(cluster, jobs.get(HEAD), said.get(HEAD, Said()), alive)
    workers = tuple(
        _worker(worker, cluster, jobs.get(worker.number), said.get(worker.number, Said()), alive)
        for worker in cluster.workers
    )
    phase = _phase(cluster, head)
    return ClusterView(
        name=cluster.name,
        key=cluster.key,
        user=cluster.user,
        phase=phase,
        reason=_reason(cluster, phase, head, workers),
        address=f"{cluster.head.address}:{cluster.head.port}",
        dashboard_port=cluster.head.dashboard_port,
        ray_version=cluster.ray_version,
        made_at=cluster.made_at,
        ended_at=cluster.ended_at,
        head=head,
        workers=workers,
        client_address=cluster.head.client_address,
    )


def _head(cluster: RayCluster, job: Job | None, said: Said, alive: frozenset[str] | None) -> Part:
    title = head_title(cluster.head.node)
    return _part(title, cluster.head.node, job, said, alive, (0, 0, HEAD))


def _worker(worker: Worker, cluster: RayCluster, job: Job | None, said: Said, alive: frozenset[str] | None) -> Part:
    title = worker_title(worker.node, worker.number)
    return _part(title, worker.node, job, said, alive, (worker.cpus, cluster.wish.size.gpus, worker.number))


def _part(
    title: str, node: str, job: Job | None, said: Said, alive: frozenset[str] | None, size: tuple[int, int, int]
) -> Part:
    cpus, gpus, number = size
    if job is None:
        return Part(title, node, None, None, cpus, gpus, number=number)
    is_running = job.state in (JobState.RUNNING, JobState.UNREACHABLE)
    if job.placement is not None:
        gpus = sum(len(share.gpus) for share in job.placement.shares)
    return Part(
        title,
        node,
        job.id,
        job.state,
        cpus,
        gpus,
        restarts=max(0, job.attempt - 1),
        is_ready=is_running and said.is_ready,
        is_alive=None if alive is None or not is_running else title in alive,
        reason=job.reason,
        number=number,
        waits=said.waits if is_running and not said.is_ready else "",
    )


def _phase(cluster: RayCluster, head: Part) -> Phase:
    if cluster.state is ClusterState.ENDED:
        return Phase.FAILED if cluster.failure else Phase.STOPPED
    if cluster.state is ClusterState.STOPPING:
        return Phase.STOPPING
    return Phase.RUNNING if head.is_ready else Phase.STARTING


def _reason(cluster: RayCluster, phase: Phase, head: Part, workers: Sequence[Part]) -> str:
    if cluster.failure:
        return cluster.failure
    if phase is Phase.STARTING:
        return _waits_for("the head", head, cluster)
    if phase is not Phase.RUNNING:
        return ""
    ready = sum(worker.has_joined for worker in workers)
    if ready == len(workers):
        return ""
    late = next(worker for worker in workers if not worker.has_joined)
    are = f"{count_of(len(workers), 'worker')} {'has' if len(workers) == 1 else 'have'}"
    return f"{ready} of {are} joined; {_waits_for(f'worker {late.number}', late, cluster)}"


def _waits_for(what: str, part: Part, cluster: RayCluster) -> str:
    if part.state is None:
        return f"{what} is not submitted yet"
    if part.state is JobState.RUNNING:
        text = f"{what} on {part.node} is {part.waits}" if part.waits else f"{what} starts Ray on {part.node}"
        if part.waits and part.number and is_loopback(cluster.head.address):
            text += "; that is a loopback address, which nodes on other machines or in containers do not reach"
        if part.restarts:
            log = f"ugro cluster logs {cluster.name}" + (f" -w {part.number}" if part.number else "")
            text += f"; it was started again {count_of(part.restarts, 'time')}: {log}"
        return text
    return f"{what} is {part.state}: {part.reason}" if part.reason else f"{what} is {part.state}"
