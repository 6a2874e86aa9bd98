"""`ugro node setup`: makes a Python environment on nodes, all at once, and collects the versions that jobs find there.

``rules.versions`` compares them. A node that is down or fails does not hold up the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ugro.features.environments.model import EnvProgress, EnvRequest, Made, NodeVersions, Setup, SetupStep
from ugro.features.environments.operations import PrepareEnvironment, SettingUp, SetUp
from ugro.features.environments.rules.naming import in_words, label_of, phase_in_words
from ugro.features.environments.rules.versions import Found, Installed, compared, packages_in
from ugro.features.environments.service.service import READY
from ugro.kernel.access.model import Caller
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.submission import Needs, Submit
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import Facts
from ugro.kernel.links.node import Node
from ugro.kernel.links.reports import HealthCheck
from ugro.kernel.links.rules import Unknown
from ugro.kernel.operations.request import Needs as Lacking
from ugro.kernel.operations.request import answers
from ugro.kernel.support.aio import together
from ugro.kernel.support.errors import EnvFailed, RemoteFailure, UgroError, Unreachable
from ugro.node.system import environment

_PACE_S = 0.1  # between two reports of progress
_PACKAGES_S = 30.0
_RESOLVING = "resolving"  # also said of what is there already


class Maker(Protocol):
    """The part of ``PythonEnvService`` that is needed here."""

    async def ensure_each(
        self,
        request: EnvRequest,
        nodes: Sequence[str],
        on_progress: Callable[[str, EnvProgress], None],
        *,
        upgrade: bool = False,
    ) -> Mapping[str, Made | UgroError]: ...


@dataclass(frozen=True, slots=True)
class _Outcome:
    row: NodeVersions
    found: Found | None = None  # None: the node failed


class SetupService:
    def __init__(self, cluster: Cluster, health: HealthCheck, jobs: JobService, maker: Maker) -> None:
        self._cluster = cluster
        self._health = health
        self._jobs = jobs
        self._maker = maker

    @answers(PrepareEnvironment)
    async def prepare(
        self, asked: PrepareEnvironment, caller: Caller
    ) -> AsyncGenerator[list[SettingUp | SetUp | Lacking]]:
        # A mistake in names or in the file is an error before the stream begins.
        nodes = self._cluster.inventory.select(asked.nodes)
        file = Path(asked.file) if asked.file is not None else None
        submit = Submit("", "", file, asked.fields, Path(asked.here), asked.env, as_options=True)
        request = await self._jobs.environment(submit)
        if isinstance(request, Needs):
            return _lacking(request)
        return NodeSetup(self._cluster, self._health, self._maker).run(nodes, request)


async def _lacking(found: Needs) -> AsyncGenerator[list[SettingUp | SetUp | Lacking]]:
    yield [Lacking(found.variables)]


class NodeSetup:
    """One round of it."""

    def __init__(self, cluster: Cluster, health: HealthCheck, maker: Maker) -> None:
        self._cluster = cluster
        self._health = health
        self._maker = maker
        self._steps: dict[str, SetupStep] = {}  # not sent yet
        self._news = asyncio.Event()
        self._began = time.monotonic()
        self._took_s: dict[str, float] = {}  # by node on which something was made, until the newest step

    async def run(
        self, nodes: Sequence[Node], request: EnvRequest | None
    ) -> AsyncGenerator[list[SettingUp | SetUp | Lacking]]:
        """Says how far each node is, then what all have. Closing it ends the installers on the nodes."""
        making = self._made(nodes, request) if request else together(map(self._as_it_is, nodes))
        work = asyncio.create_task(making, name="setup")
        work.add_done_callback(lambda _: self._news.set())
        try:
            while not work.done():
                await self._news.wait()
                self._news.clear()
                steps, self._steps = self._steps, {}
                yield [SettingUp(step) for step in steps.values()]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(work), _PACE_S)
            yield [SetUp(_result(work.result(), request))]
        finally:
            work.cancel()
            await asyncio.wait([work])

    # --- an environment ------------------------------------------------------------------------------------------

    async def _made(self, nodes: Sequence[Node], request: EnvRequest) -> list[_Outcome]:
        names = [node.spec.name for node in nodes]
        for name in names:
            self._tell(SetupStep(name, "connecting"))
        try:
            outcomes = await self._maker.ensure_each(request, names, self._on_progress, upgrade=request.upgrade)
        except EnvFailed as error:  # it can be made nowhere
            outcomes = dict.fromkeys(names, error)
        return await together(self._outcome(node, request, outcomes[node.spec.name]) for node in nodes)

    def _on_progress(self, node: str, progress: EnvProgress) -> None:
        is_ready = progress.phase == READY
        if progress.phase != _RESOLVING and not is_ready:
            self._took_s[node] = time.monotonic() - self._began
        phase = phase_in_words(progress.phase)
        numbers = (progress.done, progress.total, progress.bytes)
        self._tell(SetupStep(node, phase, *numbers, line=progress.line, is_last=is_ready))

    async def _outcome(self, node: Node, request: EnvRequest, outcome: Made | UgroError) -> _Outcome:
        name = node.spec.name
        if isinstance(outcome, UgroError):
            return self._failed(name, outcome)
        facts = await self._facts(node)
        installed = Installed(
            name, outcome.version, outcome.python, packages_in(outcome),
            facts.gpu_driver if facts else None, bool(facts and facts.gpus),
            # What others made is theirs to change.
            environment=outcome.name if request.existing is None else None,
            label=label_of(request, node.spec.labels),
        )  # fmt: skip
        row = NodeVersions(name, size_bytes=outcome.size or None, seconds=self._took_s.get(name))
        return _Outcome(row, Found(installed, outcome.packages))

    # --- the nodes' own Python -----------------------------------------------------------------------------------

    async def _as_it_is(self, node: Node) -> _Outcome:
        name = node.spec.name
        self._tell(SetupStep(name, "connecting"))
        try:
            link = await node.ready(2 * self._cluster.config.ssh.connect_timeout + 1)
            self._tell(SetupStep(name, "looking at its packages"))
            facts = await self._facts(node)
            packages, everything = await asyncio.gather(
                node_checks.packages(link, timeout_s=_PACKAGES_S),
                node_checks.check(link, environment, _PACKAGES_S),
            )
        except UgroError as error:
            return self._failed(name, error)
        if isinstance(packages, Unknown):
            return self._failed(name, RemoteFailure(packages.text, hint=packages.hint))
        others = () if isinstance(everything, Unknown) else everything.packages
        self._tell(SetupStep(name, READY, is_last=True))
        return _Outcome(NodeVersions(name), Found(node_checks.installed(link, packages, facts), others))

    async def _facts(self, node: Node) -> Facts | None:
        [[report]] = [reports async for reports in self._health.reports([node])]
        return report.facts

    def _failed(self, node: str, error: UgroError) -> _Outcome:
        self._tell(SetupStep(node, "failed", is_last=True))
        lines = error.tail if isinstance(error, EnvFailed) else ()
        is_away = isinstance(error, Unreachable)
        return _Outcome(
            NodeVersions(node, error=error.message, hint=error.hint, last_lines=lines, is_unreachable=is_away)
        )

    def _tell(self, step: SetupStep) -> None:
        self._steps[step.node] = step
        self._news.set()


def _result(outcomes: Sequence[_Outcome], request: EnvRequest | None) -> Setup:
    found = [one.found for one in outcomes if one.found is not None]
    must_agree = request is not None and request.existing is not None
    rows, findings = compared([one.row for one in outcomes], found, must_agree=must_agree)
    return Setup(in_words(request) if request else None, tuple(rows), tuple(findings))
