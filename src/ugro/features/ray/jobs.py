"""The jobs of a Ray cluster, and the program that their ranks run (``on_node``), which travels with them as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ugro.features.ray.model import RayCluster, Worker, WorkerSize, head_title, worker_title
from ugro.features.ray.on_node import LASTING
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import Job, JobSpec, Resources, ResultRule, Retry, Share, Stop
from ugro.kernel.jobs.records import Rendezvous
from ugro.kernel.jobs.script import program_argv, program_env

SETTINGS, TOKEN = "UGRO_RAY", "UGRO_RAY_TOKEN"
_MODULES = (
    "ugro.node.process.processes",
    *(f"ugro.features.ray.{name}" for name in ("on_node_start", "on_node")),
)
_RETRIES = 10
_GRACE_S = 25.0  # more than the program itself gives Ray
_ENVIRONMENTS_PYTHON = "python"  # the environment's programs are found first


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Of the cluster file."""

    dashboard_host: str
    log_level: str


rank_argv = program_argv


def rank_env(settings: Mapping[str, Any], token: str | None = None) -> dict[str, str]:
    env = program_env(_MODULES, {SETTINGS: json.dumps(settings)})
    return env if token is None else {**env, TOKEN: token}


def head_job(cluster: RayCluster, ray: RaySettings) -> JobSpec:
    head = cluster.head
    settings = {
        **_common(cluster, ray, 0, head_title(head.node)),
        "role": "head",
        "cpus": 0,
        "dashboard_port": head.dashboard_port,
        "dashboard_host": ray.dashboard_host,
        "client_port": head.client_port,
        "state": head.state_folder,
        "labels": {"ugro-node": head.node},
    }
    spec = _job(cluster, f"{cluster.name}-head", head.python, settings)
    return replace(spec, resources=Resources(cpus=0, only=(head.node,)))


def worker_job(cluster: RayCluster, worker: Worker, ray: RaySettings) -> JobSpec:
    size = cluster.wish.size
    speed = {"ugro_speed": round(worker.speed, 3)} if worker.speed is not None else {}
    labels = {"ugro-node": worker.node} | ({"ugro-speed": f"{worker.speed:.3g}"} if worker.speed is not None else {})
    settings = {
        **_common(cluster, ray, worker.number, worker_title(worker.node, worker.number)),
        "role": "worker",
        "cpus": worker.cpus,
        "memory": size.memory_bytes,
        "object_store": size.object_store_bytes,
        "parts": sum(one.node == worker.node for one in cluster.workers),
        "resources": {f"node-{worker.node}": 1, **speed},
        "labels": labels,
    }
    spec = _job(cluster, f"{cluster.name}-worker-{worker.number}", worker.python, settings)
    return replace(spec, resources=worker_resources(size, worker))


def worker_resources(size: WorkerSize, worker: Worker) -> Resources:
    return Resources(
        cpus=worker.cpus, memory_bytes=size.reserved_bytes, gpus_per_node=size.gpus, only=(worker.node,)
    )


@dataclass(frozen=True, slots=True)
class RayRole:
    """A node's part in a job that has a Ray cluster of its own."""

    number: int
    count: int
    cpus: int | None  # None: as many as the rank may use


def gang_settings(job: Job, share: Share, rendezvous: Rendezvous, role: RayRole) -> dict[str, Any]:
    """Without an id."""
    settings: dict[str, Any] = {
        "role": "worker" if role.number else "driver",
        "number": role.number,
        "title": worker_title(node_of(share.node), role.number),
        "address": inside(rendezvous.address),
        "port": rendezvous.port,
        "cpus": role.cpus,
        "memory": share.memory_bytes or None,
        "labels": {"ugro-node": node_of(share.node)},
        "resources": {f"node-{node_of(share.node)}": 1},
        "is_gang": True,
    }
    return settings if role.number else {**settings, "nodes": role.count, "argv": list(job.spec.argv)}


def key_of(secret: str) -> str:
    """In the names of folders: everybody may read it."""
    return hashlib.sha256(secret.encode()).hexdigest()[:8]


def inside(address: str) -> str:
    """Of 127.0.0.1, Ray makes an address by which other machines reach this one; of this, it does not."""
    return "127.0.0.2" if address == "127.0.0.1" else address


def _common(cluster: RayCluster, ray: RaySettings, number: int, title: str) -> dict[str, Any]:
    return {
        "id": cluster.key,
        "number": number,
        "title": title,
        "address": cluster.head.address,
        "port": cluster.head.port,
        "log_level": ray.log_level,
    }


def _job(cluster: RayCluster, name: str, python: str, settings: Mapping[str, Any]) -> JobSpec:
    return JobSpec(
        name=name,
        argv=rank_argv(_ENVIRONMENTS_PYTHON if cluster.environment else python, str(settings["role"]), cluster.name),
        env=tuple(sorted({**dict(cluster.wish.env), **rank_env(settings, cluster.token)}.items())),
        priority=cluster.wish.priority,
        time_limit_s=cluster.wish.time_limit_s,
        retry=Retry(_RETRIES, never_on=(f"exit_code:{LASTING}",)),
        stop=Stop(grace_s=_GRACE_S),
        results=ResultRule(workdir=False),
        environment=cluster.environment,
    )
