"""The jobs of a service: its replicas, and what each of them is told."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from ugro.core.door import Balance, DoorSettings
from ugro.core.job import JobSpec, Launcher, ResultRule, Retry
from ugro.core.plan import NODE_PYTHON
from ugro.core.service import EXHAUSTED, Probe, Replica, Service
from ugro.workloads.replica_node.main import SECRET, SETTINGS
from ugro.workloads.replica_node.status import FOLDER, NAME
from ugro.workloads.sent import program_argv, program_env

STATUS_SOCKET = f"{FOLDER}/{NAME}"  # in the run directory of a replica
KEY_VARIABLES = "UGRO_KEY_VARIABLES"  # of a revision's job: in which variables its engine expects a key
_USUAL_CHECK_S = 3.0  # of the door, which asks again sooner than the probe; a longer time of the user's counts
_MODULES = (
    "ugro.workloads.on_node.processes",
    "ugro.workloads.replica_node.probing",
    "ugro.workloads.replica_node.figures",
    "ugro.workloads.replica_node.status",
    "ugro.workloads.replica_node.main",
)


def replica_key(service: Service, number: int) -> str:
    return f"serve-{service.key}-{number}"


def door_key(service: Service) -> str:
    return f"serve-{service.key}-door-{service.door.number}"


def replica_job(service: Service, replica: Replica, avoid: tuple[str, ...] = ()) -> JobSpec:
    """``avoid``: nodes to use only if no others are free."""
    revision = service.of(replica.revision)
    base, name = revision.job, service.name
    env = dict(base.env)
    settings = {
        "name": name,
        "number": replica.number,
        "key": service.key,
        "door": service.door.address,
        "command": list(base.argv),
        "probes": asdict(service.spec.probes),
        "restarts": asdict(service.spec.restarts),
        "key_variables": [word for word in env.pop(KEY_VARIABLES, "").split(",") if word],
    }
    own = program_env(_MODULES, {SETTINGS: json.dumps(settings)})
    if service.secret:
        own[SECRET] = service.secret
    return replace(
        base,
        name=f"{name}-{replica.number}",
        argv=program_argv(NODE_PYTHON, "replica", name, str(replica.number)),
        launcher=Launcher.COMMAND,
        env=tuple(sorted({**env, **own}.items())),
        retry=Retry(never_on=(f"exit_code:{EXHAUSTED}",)),
        results=ResultRule(workdir=False),
        avoid=avoid,
    )


def door_settings(service: Service) -> DoorSettings:
    spec, ready = service.spec, service.spec.probes.ready
    return DoorSettings(
        name=service.name,
        port=spec.port,
        state_folder=service.key,
        address=spec.bind,
        balance=Balance.LEASTCONN,
        needs_key=spec.needs_keys,
        certificate=spec.tls.cert if spec.tls else None,
        certificate_key=spec.tls.key if spec.tls else None,
        health_path=ready.path,
        health_timeout_s=ready.timeout_s if ready.timeout_s > Probe().timeout_s else _USUAL_CHECK_S,
        health_status=ready.status,
        answer_s=spec.timeout_s,
        retries_posts=spec.retries_posts,
    )
