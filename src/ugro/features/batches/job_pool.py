"""``client.pool(engine="jobs")``: which nodes a pool gets, and its jobs as its engine asks for them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ugro.client.tunnel import Dialer, NodeStream
from ugro.features.batches.jobs_engine import BOOT, SOCKET, HostJob, JobsEngine, Seat
from ugro.features.batches.rules import Candidate, Wish, choose
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import HOLDING_STATES, JobState
from ugro.kernel.jobs.operations import CancelJob
from ugro.kernel.links.model import NodeReport, Status
from ugro.kernel.support.errors import TimedOut, UgroError, UsageError

if TYPE_CHECKING:
    from ugro.client.client import Client

log = logging.getLogger(__name__)

_END_S = 20.0
_RETRIES = 3  # of a host that failed; what its machine did to it does not count
_BRING_PYTHON = frozenset({"environment", "existing_environment", "requirements", "package", "python"})
_OURS = ("command", "script", "args", "launcher", "only", "nodes", "cpus", "label")


def jobs_engine(
    client: Client,
    nodes: int | Sequence[str] | None = None,
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> JobsEngine:
    """``options``: of the jobs, named like the command line's: memory, gpus_per_node, environment, env, workdir, …"""
    options = dict(options or {})
    nodes = None if nodes == "all" else nodes
    if wrong := [name for name in options if name in _OURS]:
        raise UsageError(f"a pool chooses {wrong[0]!r} itself", hint="give nodes=… and workers=…")
    gpus = options.get("gpus_per_node")
    if gpus is not None and (not isinstance(gpus, int) or gpus < 1):
        raise UsageError(f"gpus_per_node={gpus!r}: a pool needs a number of GPUs per node", hint="gpus_per_node=1")
    if gpus is not None and workers is not None:
        raise UsageError("with GPUs there is one process for each", hint="leave workers out")
    named = (nodes,) if isinstance(nodes, str) else tuple(nodes) if isinstance(nodes, Sequence) else nodes
    wish = Wish(named, workers, gpus)
    brings_python = not _BRING_PYTHON.isdisjoint(options)
    reports = client.health()
    chosen = choose(_candidates(client, reports, brings_python=brings_python), wish)
    pythons = {one.name: one.machine.python_path for one in reports if one.machine and not brings_python}
    return JobsEngine(PoolJobs(client, options, pythons), [Seat(node, slots) for node, slots in chosen])


class PoolJobs:
    """Used by the threads of an engine: never over the client's own connection."""

    def __init__(self, client: Client, options: Mapping[str, Any], pythons: Mapping[str, str]) -> None:
        self._client = client
        self._options = dict(options)
        self._pythons = pythons
        self._name = self._options.pop("name", f"pool-{os.urandom(3).hex()}")

    def submit(self, seats: Sequence[Seat]) -> list[int]:
        jobs: list[int] = []
        try:
            for number, seat in enumerate(seats, start=1):
                jobs.append(self._client.jobs.submit(fields=self._fields(seat, number)).id)
        except (UgroError, KeyboardInterrupt):
            self.end(jobs, 0.0)
            raise
        return jobs

    def look(self, job: int) -> HostJob:
        with self._client.twin() as client:
            found = client.jobs.get(job)
        is_running = found.state in (JobState.RUNNING, JobState.UNREACHABLE)
        return HostJob(found.is_final, is_running, found.reason)

    def dial(self, node: str, job: int) -> NodeStream:
        return Dialer(self._client, node, job=job, socket=SOCKET)()

    def end(self, jobs: Sequence[int], grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        with self._client.twin() as client:
            for job in jobs:
                with contextlib.suppress(TimedOut):
                    client.jobs.wait(job, timeout_s=max(0.0, deadline - time.monotonic()))
            for job in jobs:
                with contextlib.suppress(UgroError):  # it has ended
                    client.ask(CancelJob(str(job)))
            deadline = time.monotonic() + _END_S
            for job in jobs:
                try:
                    client.jobs.wait(job, timeout_s=max(0.0, deadline - time.monotonic()))
                except TimedOut:
                    log.warning("job %d is cancelled and has not ended yet: its node is away", job)

    def _fields(self, seat: Seat, number: int) -> dict[str, Any]:
        python = self._pythons.get(seat.node, "python3")
        # One thread for each slot in numeric libraries: there is a slot for each core.
        env = {"OMP_NUM_THREADS": "1", **_variables(self._options.get("env"))}
        ours = {"name": f"{self._name}-{number}", "command": [python, "-c", BOOT], "only": [seat.node]}
        return {"retries": _RETRIES, **self._options, **ours, "cpus": seat.slots, "env": env}


def _variables(given: Any) -> dict[str, Any]:
    """From a map, or from texts such as NAME=VALUE and NAME; the agent checks them."""
    if isinstance(given, Mapping):
        return dict(given)
    pairs = (str(text).partition("=") for text in ([given] if isinstance(given, str) else given or ()))
    return {name: text if equals else None for name, equals, text in pairs}


def _candidates(client: Client, reports: Sequence[NodeReport], *, brings_python: bool) -> list[Candidate]:
    held: Counter[str] = Counter()
    for job in client.jobs.newest(None, states=HOLDING_STATES):
        for share in job.held.shares if job.held else ():
            held[node_of(share.node)] += share.cpus
    found = []
    for report in reports:
        cores = report.machine.cores if report.machine else 0
        problem = _problem(report, brings_python=brings_python)
        found.append(Candidate(report.name, cores, held[report.name], problem, (*report.labels, report.role.value)))
    return found


def _problem(report: NodeReport, *, brings_python: bool) -> str | None:
    if report.status is Status.UNREACHABLE or report.machine is None:
        return report.error or "unreachable"
    if report.drained is not None:
        return "it is drained"
    if report.same_as is not None:
        return report.second_name
    ours = ".".join(map(str, sys.version_info[:2]))
    if not brings_python and ".".join(report.machine.python.split(".")[:2]) != ours:
        return f"its Python is {report.machine.python}, and functions are sent from {ours}"
    return None
