"""What the programs of replicas say on their nodes: one connection through the link for each, as long as it runs."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, replace

from ugro.features.services.model import EXHAUSTED, Balance, DoorSettings, Probe, ProbeReport, Replica, Service
from ugro.features.services.node.replica import FOLDER, NAME, SECRET, SETTINGS
from ugro.kernel.jobs.model import JobSpec, Launcher, ResultRule, Retry
from ugro.kernel.jobs.records import NODE_PYTHON
from ugro.kernel.jobs.script import program_argv, program_env
from ugro.kernel.links import tunnels
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.node import Identity
from ugro.kernel.links.tunnels import SocketTarget
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.moments import delay_s
from ugro.node import foreign

# --- service jobs -----------------------------------------------------------------------------------------------------
# The jobs of a service: its replicas, and what each of them is told.


STATUS_SOCKET = f"{FOLDER}/{NAME}"  # in the run directory of a replica
KEY_VARIABLES = "UGRO_KEY_VARIABLES"  # of a revision's job: in which variables its engine expects a key
_USUAL_CHECK_S = 3.0  # of the door, which asks again sooner than the probe; a longer time of the user's counts
_MODULES = (
    "ugro.node.process.processes",
    "ugro.features.services.node.probing",
    "ugro.features.services.node.replica",
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


# --- replica watch ----------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

Run = tuple[int, int]  # a job and its attempt
_READY_S = 10.0
_LONGEST_LINE = 64 * 1024
_SILENT_S = 30.0  # its program says something every 10 s


class ReplicaWatch:
    def __init__(self, cluster: Cluster, identity: Identity) -> None:
        self._cluster = cluster
        self.identity = identity
        self._tasks: dict[Run, asyncio.Task[None]] = {}
        self._kept: dict[int, frozenset[Run]] = {}  # by service
        self._reports: dict[Run, ProbeReport] = {}
        self.changed = ChangeSignal()

    def keep(self, service: int, runs: Mapping[Run, str]) -> None:
        """Listens to these runs of a service, each on its node, and to no others of it."""
        for run in self._kept.get(service, frozenset()) - runs.keys():
            self._tasks.pop(run).cancel()
            self._reports.pop(run, None)
        self._kept[service] = frozenset(runs)
        for run, node in runs.items():
            if run not in self._tasks:
                self._tasks[run] = asyncio.create_task(self._listen(run, node), name=f"listen to job {run[0]}")

    def report(self, run: Run) -> ProbeReport | None:
        return self._reports.get(run)

    def close(self) -> None:
        for service in list(self._kept):
            self.keep(service, {})

    async def _listen(self, run: Run, node: str) -> None:
        """What was said last stays while the connection is away: the node may be busy, and the door asks by itself."""
        failures = 0
        while True:
            try:
                async for report in self._said(run, node):
                    failures = 0
                    if self._reports.get(run) != report:
                        self._reports[run] = report
                        self.changed.notify()
            except (UgroError, TimeoutError, DecodeError, ValueError) as error:
                log.debug("job %d on %s cannot be listened to: %s", run[0], node, error)
            failures += 1
            await asyncio.sleep(delay_s(failures, 0.5, base_s=0.1, cap_s=2.0))

    async def _said(self, run: Run, node: str) -> AsyncIterator[ProbeReport]:
        target = SocketTarget(*run, STATUS_SOCKET)
        place = self._cluster.inventory.get(node)
        duplex = await tunnels.connect(place, self.identity, target, ready_s=_READY_S)
        left = b""
        try:
            pieces = aiter(duplex)
            while True:
                async with asyncio.timeout(_SILENT_S):
                    _, piece = await anext(pieces)
                if not piece:
                    return
                *lines, left = (left + piece).split(b"\n")
                if len(left) > _LONGEST_LINE:
                    raise ValueError("a line that does not end")
                for line in lines:
                    if line:
                        yield _parsed(line)
        except StopAsyncIteration:
            return
        finally:
            duplex.cancel()


def _parsed(line: bytes) -> ProbeReport:
    report = decode(ProbeReport, foreign.parsed(line))
    figures = report.figures
    for number in (figures.prompt_tokens, figures.generated_tokens, figures.batch_size):
        if number is not None and not math.isfinite(number):
            raise ValueError("a figure that is no number")
    return report
