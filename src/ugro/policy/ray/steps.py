"""What is to be done next for a Ray cluster: which jobs to submit, which to cancel, and when it is over.

Pure: the row and its jobs in, steps out. Asked again after each change, so a step that was not done comes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ugro.core.job import Ending, Job, JobState
from ugro.core.ray_cluster import ClusterState, RayCluster, Worker

HEAD = 0  # its number among the jobs; workers begin at 1


@dataclass(frozen=True, slots=True)
class Submit:
    worker: Worker | None  # None: the head


@dataclass(frozen=True, slots=True)
class Cancel:
    job: int


@dataclass(frozen=True, slots=True)
class Stop:
    """It cannot go on: everything of it ends."""

    failure: str | None


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing of it runs any more."""


Step = Submit | Cancel | Stop | Close


def next_steps(cluster: RayCluster, jobs: Mapping[int, Job]) -> list[Step]:
    """``jobs``: those that were submitted, by number."""
    if cluster.state is ClusterState.ENDED:
        return []
    if cluster.state is ClusterState.STOPPING:
        return list(_stopping(jobs))
    head = jobs.get(HEAD)
    if head is None:
        return [Submit(None)]
    if head.is_final:
        return [Stop(None if head.state is JobState.CANCELLED else f"its head {head.state}: {head.reason}")]
    return [*_missing(cluster, head, jobs), *_unwanted(cluster, jobs)]


def _missing(cluster: RayCluster, head: Job, jobs: Mapping[int, Job]) -> Iterator[Step]:
    """Workers hold devices while they wait for their head, so they come when it runs."""
    if head.state is JobState.RUNNING:
        for worker in cluster.workers:
            if worker.number not in jobs:
                yield Submit(worker)


def _unwanted(cluster: RayCluster, jobs: Mapping[int, Job]) -> Iterator[Step]:
    for worker in cluster.dropped:
        if (job := jobs.get(worker.number)) is not None and _goes_on(job):
            yield Cancel(job.id)


def _stopping(jobs: Mapping[int, Job]) -> Iterator[Step]:
    if all(job.is_final for job in jobs.values()):
        yield Close()
        return
    for job in jobs.values():
        if _goes_on(job):
            yield Cancel(job.id)


def _goes_on(job: Job) -> bool:
    return not job.is_final and job.ending is not Ending.CANCELLED
