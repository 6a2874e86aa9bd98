"""Before ranks start: sets up each node, compares their environments, and finds an address where ranks can meet.

What is found is judged by pure rules. Raises ``LaunchRefused`` when the attempt must not start.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from ugro.features.environments.model import Made
from ugro.features.environments.rules.imports import lack_of_packages, still_missing
from ugro.features.environments.rules.naming import label_of
from ugro.features.environments.rules.versions import Installed, Need, differences, lack_of_imports, packages_in
from ugro.features.environments.service.installed import NodeModules
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Cause, Failure, Job, Launcher, Placement
from ugro.kernel.jobs.records import Rendezvous
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links.checks import CONNECT_S, mesh
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.diagnosis import LOOPBACK, Apart, Endpoint, Meeting, meet
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import Role
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.links.rules import Unknown
from ugro.kernel.support.aio import one_error, together
from ugro.kernel.support.errors import RemoteFailure, UgroError
from ugro.node.check import modules
from ugro.node.messages import Connections, Packages
from ugro.node.runs import api
from ugro.node.runs.setup import setup

# --- where ranks meet -------------------------------------------------------------------------------------------------
# They meet at an address of the first node that all others have really reached.


log = logging.getLogger(__name__)

# On a busy machine the first of these does not tell slow from unreachable: nodes that seem to be apart get the second.
_SETTLE_S = (0.25, CONNECT_S)


class PortTaken(UgroError):
    """Another process listens where the first rank would."""


async def find_meeting(links: Sequence[Link], endpoints: Sequence[Endpoint], port: int) -> Meeting | Apart:
    """``port``, of the first node, is where its rank will listen. Raises ``PortTaken`` if another process does."""
    async with mesh(links, endpoints, port) as nodes:
        if nodes.taken_ports:
            raise PortTaken(f"port {port} is in use", subject=endpoints[0].node)
        _raise_first(nodes.failed)
        for settle_s in _SETTLE_S:
            outcomes = await nodes.connect(settle_s)
            _raise_first(outcomes)
            found = meet(nodes.endpoints, port, {n: one for n, one in outcomes.items() if isinstance(one, Connections)})
            if isinstance(found, Meeting):
                break
            log.info("nodes do not reach each other within %g s: %s", settle_s, found.text)
    return found


def _raise_first(outcomes: Mapping[str, object]) -> None:
    for outcome in outcomes.values():
        if isinstance(outcome, UgroError):
            raise outcome


# --- checks before ranks start ----------------------------------------------------------------------------------------


LOOPBACK_INTERFACE = "lo"
_PACKAGES_AGE_S = 300.0
_PACKAGES_S = 20.0
_RESOLVE_S = 3.0
_PORTS_TRIED = 3
_SETUP_S = 3600.0

Environments = Mapping[str, Made]  # by node
_NONE: Environments = {}


class LaunchRefused(UgroError):
    """An attempt that must not start, and the failure cause that decides whether it is retried."""

    kind = "refused"

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason, hint=failure.hint, subject=failure.node)
        self.failure = failure

    @property
    def failure_cause(self) -> Cause:
        return self.failure.cause

    def __str__(self) -> str:
        return self.message  # it names its nodes itself


@dataclass(frozen=True, slots=True)
class _Known:
    """What was installed at that moment; valid as long as the link it was asked over lasts."""

    link: Link
    packages: Packages
    asked_at: float


class Preflight:
    def __init__(self, cluster: Cluster, watch: RunTracker, modules: NodeModules) -> None:
        self._cluster = cluster
        self._watch = watch
        self._modules = modules
        self._known: dict[str, _Known] = {}

    def forget(self, nodes: Iterable[str]) -> None:
        """Asks again what is installed there before the next launch: after a failure or a change."""
        for node in nodes:
            self._known.pop(node, None)

    # --- setup -------------------------------------------------------------------------------------------------

    async def set_up(self, job: Job, placement: Placement, environments: Environments = _NONE) -> None:
        """Runs the job's setup on each of its nodes that has not yet run the same one."""
        if job.spec.setup is not None:
            await together(self._set_up(job, node, environments.get(node)) for node in placement.nodes)

    async def _set_up(self, job: Job, node: str, made: Made | None) -> None:
        link = await self._link(node)
        assert link.machine is not None  # the link is open
        content: dict[str, Any] = {"script": job.spec.setup, "env": dict(job.spec.env), "cwd": job.spec.cwd}
        if job.spec.snapshot is not None:  # it runs in a copy of its own: requirements.txt is there
            content["code"] = job.spec.snapshot
        if made is not None:
            content["path"] = [str(PurePosixPath(made.python).parent)]
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        # Lets the setup use the Python that will run the ranks, and install into one that is not UGRO's.
        python = made.python if made is not None else link.machine.python_path
        content["env"] = {**dict(job.spec.env), "UGRO_NODE": node_of(node), "UGRO_PYTHON": python}
        asked = self._identity(node).asks(setup, job=str(job.id), attempt=job.attempt, key=key, **content)
        answer = await link.call(*asked, timeout_s=_SETUP_S)
        if answer.get("is_new", True):
            self.forget([node])
            self._modules.forget(self._cluster.inventory.get(node))
        if code := int(answer["code"]):
            lines = _lines(answer.get("tail"))
            reason = f"the setup on {node} ended with exit code {code}" + (f": {lines[-1]}" if lines else "")
            raise LaunchRefused(Failure(Cause.SETUP_FAILED, reason, node=node, exit_code=code, last_lines=lines))

    # --- what is installed -------------------------------------------------------------------------------------

    async def agree(self, job: Job, placement: Placement, environments: Environments = _NONE) -> tuple[str, ...]:
        """Refuses differences that break the job; returns the others as notes."""
        if environments:
            return await self._agree_on(environments, job, placement)
        need = Need(job.spec.launcher, any(share.gpus for share in placement.shares))
        if need.launcher is Launcher.COMMAND or len(placement.nodes) == 1:
            return ()
        await self._expect_imports(job, placement)
        found = differences(await together(self._installed(node) for node in placement.nodes), need)
        if any(one.is_fatal for one in found):
            # It may have been repaired meanwhile: what we know may be minutes old.
            self.forget(placement.nodes)
            found = differences(await together(self._installed(node) for node in placement.nodes), need)
        fatal = [one for one in found if one.is_fatal]
        if fatal:
            self.forget(placement.nodes)
            reason = "; ".join(one.text for one in fatal)
            raise LaunchRefused(Failure(Cause.MISMATCH, reason, node=fatal[0].node, hint=fatal[0].hint))
        return tuple(one.text for one in found)

    async def _agree_on(self, environments: Environments, job: Job, placement: Placement) -> tuple[str, ...]:
        """Of environments, what is in them is known. They may differ by an override, or because a user made them."""
        need = Need(job.spec.launcher, any(share.gpus for share in placement.shares))
        if need.launcher is Launcher.COMMAND:
            return ()
        await self._expect_packages(job, environments)
        found = differences([self._inside(job, node, made) for node, made in environments.items()], need)
        if fatal := [one for one in found if one.is_fatal]:
            reason = "; ".join(one.text for one in fatal)
            raise LaunchRefused(Failure(Cause.MISMATCH, reason, node=fatal[0].node, hint=fatal[0].hint))
        return tuple(one.text for one in found)

    def _inside(self, job: Job, node: str, made: Made) -> Installed:
        labels = self._cluster.inventory.get(node).spec.labels
        label = label_of(job.spec.environment, labels) if job.spec.environment else ""
        name = made.name if made.is_made else None
        return Installed(node, made.version, made.python, packages_in(made), environment=name, label=label)

    async def _expect_packages(self, job: Job, environments: Environments) -> None:
        imports = job.spec.imports
        if job.spec.setup is not None or not imports.is_certain or not imports.names:
            return
        missing = await together(self._missing(node, made, imports.names) for node, made in environments.items())
        is_ours = job.spec.environment is not None and job.spec.environment.existing is None
        if (failure := lack_of_packages(dict(missing), is_ours)) is not None:
            raise LaunchRefused(failure)

    async def _missing(self, node: str, made: Made, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        link = await self._link(node)
        found = await node_checks.check(link, modules, _PACKAGES_S, names=list(names), python=made.python)
        missing = () if isinstance(found, Unknown) else still_missing(found.missing, made.version)
        return node, tuple(name for name in names if name in missing)

    async def _expect_imports(self, job: Job, placement: Placement) -> None:
        """Refuses a start on several nodes that would end with an ImportError on one of them."""
        imports = job.spec.imports
        if job.spec.setup is not None or not imports.is_certain:
            return
        nodes = [self._cluster.inventory.get(node) for node in placement.nodes]
        suspects = [node for node in nodes if not self._modules.lacking(node).isdisjoint(imports.names)]
        if suspects:
            # It may have been installed meanwhile: what we know may be half a minute old.
            await self._modules.refresh(suspects, max_age_s=0.0)
        missing = {node.spec.name: sorted(self._modules.lacking(node).intersection(imports.names)) for node in suspects}
        if (failure := lack_of_imports(missing, _pythons(suspects))) is not None:
            raise LaunchRefused(failure)

    async def _installed(self, node: str) -> Installed:
        link = await self._link(node)
        known = self._known.get(node)
        if known is None or known.link is not link or time.monotonic() - known.asked_at > _PACKAGES_AGE_S:
            packages = await node_checks.packages(link, timeout_s=_PACKAGES_S)
            if isinstance(packages, Unknown):
                return node_checks.installed(link, packages)
            known = self._known[node] = _Known(link, packages, time.monotonic())
        return node_checks.installed(link, known.packages)

    # --- where ranks meet --------------------------------------------------------------------------------------

    async def rendezvous(self, job: Job, placement: Placement) -> Rendezvous:
        """An address and a free port of the first node that all others have reached."""
        first, *others = placement.nodes
        port = await self._reserve_port(job, first)
        if not others:
            # Not its host name: many machines resolve it to an address that they do not have.
            return Rendezvous(LOOPBACK, port, ((first, LOOPBACK_INTERFACE),))
        for _ in range(_PORTS_TRIED):
            try:
                found = await self._meeting(placement.nodes, port)
            except PortTaken as error:
                log.info("the reserved port was taken meanwhile, trying another one: %s", error, extra={"job": job.id})
                port = await self._another_port(job, first)
            else:
                break
        else:
            reason = f"{first}: {_PORTS_TRIED} ports in a row were free and then taken"
            hint = f"see who listens: ugro exec {node_of(first)} -- ss -ltnp"
            raise LaunchRefused(Failure(Cause.PORT_IN_USE, reason, node=first, hint=hint))
        if isinstance(found, Apart):
            raise LaunchRefused(Failure(Cause.START_FAILED, found.text, node=found.node, hint=found.hint))
        return Rendezvous(found.address, port, found.interfaces)

    async def _meeting(self, nodes: Sequence[str], port: int) -> Meeting | Apart:
        async with one_error() as group:
            opening = [group.create_task(self._link(node)) for node in nodes]
            wanted = group.create_task(self._wanted(nodes[0]))
        links = [link.result() for link in opening]
        endpoints = [node_checks.endpoint(link) for link in links]
        endpoints[0] = replace(endpoints[0], wanted=wanted.result())
        return await find_meeting(links, endpoints, port)

    def guess(self, placement: Placement) -> Rendezvous:
        """Where ranks will probably meet, without asking the nodes."""
        nodes = [self._cluster.inventory.get(node) for node in placement.nodes]
        settings, first = self._cluster.config.cluster, nodes[0].spec
        if len({node.machine.boot_id if node.machine else node.spec.name for node in nodes}) == 1:
            interfaces = tuple((node, LOOPBACK_INTERFACE) for node in placement.nodes)
            return Rendezvous(LOOPBACK, settings.master_port, interfaces, is_tentative=True)
        wanted = settings.master_ip if first.role is Role.MASTER else None
        return Rendezvous(wanted or first.host or first.name, settings.master_port, is_tentative=True)

    async def _reserve_port(self, job: Job, node: str) -> int:
        settings = self._cluster.config.cluster
        # Not the default one: agents that do not know of each other would all want it.
        preferred = settings.master_port if "master_port" in settings.given_keys else None
        link = await self._link(node)
        asks = self._identity(node).asks
        asked = asks(api.reserve_port, job=str(job.id), attempt=job.attempt, count=1, preferred=preferred)
        try:
            answer = await link.call(*asked, timeout_s=self._watch.runs(node).answer_s)
            return int(answer["ports"][0])
        except RemoteFailure as error:
            if error.cause != "no-port":
                raise
            raise LaunchRefused(Failure(Cause.PORT_IN_USE, str(error), node=node)) from error

    async def _another_port(self, job: Job, node: str) -> int:
        link = await self._link(node)
        asked = self._identity(node).asks(api.free_port, job=str(job.id), attempt=job.attempt)
        await link.call(*asked, timeout_s=self._watch.runs(node).answer_s)
        return await self._reserve_port(job, node)

    async def _wanted(self, first: str) -> str | None:
        """The address that the user wants ranks to meet at, if it can be the first node's."""
        wanted = self._cluster.config.cluster.master_ip
        if wanted is None or self._cluster.inventory.get(first).spec.role is not Role.MASTER:
            return None
        try:
            async with asyncio.timeout(_RESOLVE_S):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(wanted, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            log.warning("cluster.master_ip is not used: %s cannot be resolved: %s", wanted, error)
            return None
        return str(found[0][4][0])

    async def _link(self, node: str) -> Link:
        runs = self._watch.runs(node)
        return await runs.node.ready(runs.connect_s, patiently=True)

    def _identity(self, node: str) -> Identity:
        return self._watch.runs(node).identity


def _pythons(nodes: Iterable[Node]) -> dict[str, str]:
    return {node.spec.name: node.machine.python_path for node in nodes if node.machine is not None}


def _lines(tail: object) -> tuple[str, ...]:
    if isinstance(tail, str):
        return tuple(tail.splitlines())
    return tuple(str(line) for line in tail) if isinstance(tail, list) else ()
