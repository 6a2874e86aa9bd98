"""Ray clusters and their jobs, for tests of rules."""

from __future__ import annotations

from ugro.features.ray.model import ClusterWish, Head, RayCluster, Worker
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Placement, Share


def cluster(workers: int, **wish: int) -> RayCluster:
    return RayCluster(
        id=1,
        key="ab12cd34",
        user="ann",
        wish=ClusterWish(**wish),  # type: ignore[arg-type]
        head=Head("n1", "/bin/python", "10.0.0.1", 6379, 8265, "/root/.ugro/ray/ab12cd34"),
        token="secret",
        workers=tuple(Worker(number, f"n{number}", 2, "/bin/python") for number in range(1, workers + 1)),
    )


def job(number: int, state: JobState = JobState.RUNNING, reason: str = "", attempt: int = 1) -> Job:
    return Job(
        number,
        JobSpec("j", ("x",)),
        "ann",
        state,
        reason,
        "2026-01-01T00:00:00+00:00",
        attempt=attempt,
        placement=Placement((Share("n1"),)),
    )
