"""``client.pool``, and the cluster as a place for an estimate."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ugro.kernel.support.errors import UsageError

if TYPE_CHECKING:
    from ugro.client.client import Client
    from ugro.features.batches.model import Engine, Place
    from ugro.features.batches.pool import Pool

# Assumed of a Ray cluster that does not run yet, as docs/benchmarks.md has them; a running one is measured.
_START_S = 12.0
_SLOT_ITEM_S = 2e-6
_DRIVER_ITEM_S = 1e-6
_BYTES_PER_S = 117e6  # 1 Gbit/s


@dataclass(frozen=True, slots=True)
class PoolWish:
    engine: str | None = None  # local, ray or jobs; None: ray if there is a cluster, jobs if nodes are wanted
    nodes: int | Sequence[str] | None = None
    workers: int | None = None  # in all
    address: str | None = None  # of a Ray cluster
    options: Mapping[str, Any] = field(default_factory=dict)  # of jobs
    shows_output: bool = True  # what functions print on Ray, on the driver's stdout


def open_pool(client: Client, wish: PoolWish) -> Pool:
    from ugro.features.batches.pool import Pool

    address = wish.address or os.environ.get("RAY_ADDRESS")
    asks_for_jobs = wish.nodes is not None or wish.options
    engine = wish.engine or ("ray" if address else "jobs" if asks_for_jobs else "local")
    if engine == "jobs":
        from ugro.features.batches.job_pool import jobs_engine

        return Pool(engine=jobs_engine(client, wish.nodes, wish.workers, wish.options))
    if asks_for_jobs:
        what = "nodes" if wish.nodes is not None else next(iter(wish.options))
        raise UsageError(f"the engine {engine} has no option {what!r}", hint="the engine jobs has it")
    if engine == "ray":
        return Pool(engine=_ray_engine(client, wish, address))
    return Pool(engine=engine, workers=wish.workers)


def _ray_engine(client: Client, wish: PoolWish, address: str | None) -> Engine:
    """At the address; else on the only cluster of UGRO's that runs; else on what Ray finds on this machine."""
    from ugro.features.batches.ray_engine import RayEngine

    settings = {} if address else _only_cluster(client)
    address = address or settings.get("RAY_ADDRESS") or "auto"
    return RayEngine(address, wish.workers, shows_output=wish.shows_output, settings=settings)


def _only_cluster(client: Client) -> dict[str, str]:
    from ugro.features.ray.client import connection
    from ugro.features.ray.operations import GetRayClusterAccess, ListRayClusters

    if client.running_agent() is None or len(client.ask(ListRayClusters()).clusters) != 1:
        return {}
    return connection(client.home, client.ask(GetRayClusterAccess()).access)


def cluster_place(client: Client) -> Place | None:
    """The nodes of the running agent's cluster that could take work; None if there is no other machine than this."""
    from ugro.features.batches.model import Place
    from ugro.features.hardware.operations import GetHardware

    agent = client.running_agent()
    if agent is None or agent.cluster_file is None:
        return None
    usable = [one for one in client.health() if one.machine and one.facts and not one.drained and not one.same_as]
    cores = sum(one.machine.cores for one in usable if one.machine)
    if not cores:
        return None
    speeds = [link.bytes_per_s for link in client.ask(GetHardware()).links if link.bytes_per_s]
    return Place(
        f"{len(usable)} node{'' if len(usable) == 1 else 's'}",
        cores,
        start_s=_START_S,
        slot_item_s=_SLOT_ITEM_S,
        driver_item_s=_DRIVER_ITEM_S,
        bytes_per_s=min(speeds, default=_BYTES_PER_S),
        is_assumed=True,
    )
