"""Services that are applications on a Ray cluster: an existing one, or one that is started for the service."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ugro.agent.ray_cluster.service import RayClusters
from ugro.core.errors import UsageError
from ugro.core.job import JobSpec, Resources
from ugro.core.ray_cluster import ClusterWish, RayCluster, WorkerSize
from ugro.core.service import Service
from ugro.store.services import ServiceStore
from ugro.workloads.ray_jobs import TOKEN

_FAMILY = "UGRO_RAY_SERVE"  # how the names of a service's applications begin
_LEAST_GRACE_S = 90.0  # to be deleted from the cluster, an application is drained first


class RayPlaces:
    def __init__(self, services: ServiceStore, clusters: RayClusters) -> None:
        self._services = services
        self._clusters = clusters
        self.preparing = clusters.preparing

    async def added(self, service: Service, cluster: RayCluster | None) -> Service:
        """Recorded, with the cluster that is started for it."""
        if cluster is None:
            return await self._services.add(service)
        made, started = await self._services.add_with_cluster(service, cluster)
        if started is not None:
            self._clusters.note(started)
        return made

    async def existing(self, name: str, user: str) -> RayCluster:
        """Raises UgroError if there is none of that name, it is another person's own, or it has no Ray Serve."""
        found = await self._clusters.active(name)
        self._clusters.expect_open_to(found, user)
        if (problem := await self._clusters.lack_of_serve(found)) is not None:
            raise problem
        return found

    async def own(self, service: str, user: str, job: JobSpec) -> RayCluster:
        """Not recorded. Each worker gets what the service asks for. The caller holds ``preparing`` until it is."""
        wanted = job.resources
        size = WorkerSize(wanted.cpus, wanted.memory_bytes or None, None, max(0, wanted.gpus_per_node))
        wish = ClusterWish(
            f"{service}-ray", labels=wanted.labels, only=wanted.only, size=size, priority=job.priority
        )
        made = await self._clusters.prepare(wish, user, job.environment, lambda text: None)
        if (problem := await self._clusters.lack_of_serve(made)) is not None:
            raise problem
        return made

    async def replica(self, service: Service, job: JobSpec) -> JobSpec:
        """The job of a replica, on the head's node of its cluster as that is now. Raises NotFound if it is gone."""
        if service.ray is None:
            return job
        cluster = await self._clusters.active(service.ray.cluster)
        own = {
            "RAY_ADDRESS": f"{cluster.head.address}:{cluster.head.port}",
            _FAMILY: f"ugro-{service.key}",
            TOKEN: cluster.token,
        }
        return replace(at_head(job, cluster), env=tuple(sorted({**dict(job.env), **own}.items())))

    async def has_own(self, service: Service) -> bool:
        """A cluster that was started for it, and has not ended."""
        return service.ray is not None and service.ray.is_own and await self._clusters.is_open(service.ray.cluster)

    async def stop_own(self, service: Service) -> None:
        if service.ray is not None and await self.has_own(service):
            await self._clusters.stop(service.ray.cluster)


def at_head(job: JobSpec, cluster: RayCluster) -> JobSpec:
    """It computes nothing itself: the cluster's workers have the devices."""
    return replace(
        job,
        resources=Resources(cpus=0, only=(cluster.head.node,)),
        environment=cluster.environment,
        stop=replace(job.stop, grace_s=max(job.stop.grace_s, _LEAST_GRACE_S)),
    )


def expect_unnamed(cluster: str, given: Collection[str]) -> None:
    """``given``: names of options about devices and packages, which a cluster that exists has already."""
    if given:
        hint = "its deployments say what they take of it: num_cpus, num_gpus and runtime_env in ray_actor_options"
        options = ", ".join(sorted(given))
        raise UsageError(f"the Ray cluster {cluster} has its devices and packages already: {options}", hint=hint)

