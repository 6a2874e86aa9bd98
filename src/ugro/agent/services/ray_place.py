"""Services that are applications on a Ray cluster: an existing one, or one that is started for the service."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ugro.agent.ray_cluster.service import RayClusters
from ugro.agent.support.caller import caller
from ugro.core.errors import NotAllowed, UsageError
from ugro.core.job import JobSpec, Resources
from ugro.core.ray_cluster import ClusterWish, RayCluster, WorkerSize
from ugro.core.service import Service
from ugro.store.services import ServiceStore
from ugro.workloads.ray_jobs import TOKEN

_FAMILY = "UGRO_RAY_SERVE"  # how the names of a service's applications begin
_ANOTHER = "name one of your own: --ray-cluster NAME; without it, one is started for the service"
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
        """Raises UgroError if there is none of that name, it is not the caller's to use, or it has no Ray Serve."""
        found = await self._clusters.active(name)
        if (asks := caller()) is not None:
            _expect_usable(found, may_change=asks.may_change(found.user), knows=asks.knows_values_of(found.user))
        await self._clusters.expect_open_to(found, user)
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
        """The job of a replica, on the head's node of its cluster as that is now. Raises UgroError if it is gone."""
        if service.ray is None:
            return job
        cluster = await self._clusters.active(service.ray.cluster)
        # A cluster of somebody else may have taken the name, or have another environment than the one that was allowed.
        may_change = cluster.user in (service.user, service.ray.user)
        knows = cluster.user == service.user or cluster.environment == job.environment
        _expect_usable(cluster, may_change=may_change, knows=knows)
        await self._clusters.expect_open_to(cluster, service.user)
        own = {
            "RAY_ADDRESS": f"{cluster.head.address}:{cluster.head.port}",
            _FAMILY: f"ugro-{service.key}",
            TOKEN: cluster.token,
        }
        return replace(at_head(job, cluster), env=tuple(sorted({**dict(job.env), **own}.items())))

    async def has_own(self, service: Service) -> bool:
        """A cluster that was started for it, and has not ended."""
        return await self._own_of(service) is not None

    async def stop_own(self, service: Service) -> None:
        if (cluster := await self._own_of(service)) is not None:
            await self._clusters.stop(str(cluster.id))

    async def _own_of(self, service: Service) -> RayCluster | None:
        if service.ray is None or not service.ray.is_own:
            return None
        found = await self._clusters.open_one(service.ray.cluster)
        return found if found is not None and found.user == service.user else None


def at_head(job: JobSpec, cluster: RayCluster) -> JobSpec:
    """It computes nothing itself: the cluster's workers have the devices."""
    return replace(
        job,
        resources=Resources(cpus=0, only=(cluster.head.node,)),
        environment=cluster.environment,
        stop=replace(job.stop, grace_s=max(job.stop.grace_s, _LEAST_GRACE_S)),
    )


def _expect_usable(cluster: RayCluster, *, may_change: bool, knows: bool) -> None:
    """Replicas get its token, which runs anything there, and its environment; the service's user sees both."""
    if not may_change:
        raise NotAllowed(f"the Ray cluster {cluster.name} is {cluster.user}'s", hint=_ANOTHER)
    environment = cluster.environment
    if environment is not None and environment != environment.masked and not knows:
        raise NotAllowed(
            f"the environment of the Ray cluster {cluster.name} has passwords of {cluster.user}", hint=_ANOTHER
        )


def expect_unnamed(cluster: str, given: Collection[str]) -> None:
    """``given``: names of options about devices and packages, which a cluster that exists has already."""
    if given:
        hint = "its deployments say what they take of it: num_cpus, num_gpus and runtime_env in ray_actor_options"
        options = ", ".join(sorted(given))
        raise UsageError(f"the Ray cluster {cluster} has its devices and packages already: {options}", hint=hint)

