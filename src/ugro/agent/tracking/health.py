"""Health checks: probes over the open links, assessed by policy."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from weakref import WeakKeyDictionary

from ugro.agent.tracking.cluster import Cluster
from ugro.core.errors import RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.core.node import Facts, NodeReport, Status
from ugro.core.owner import OwnerReport
from ugro.core.power import PowerReport
from ugro.core.support.codec import DecodeError, decode
from ugro.nodes.node import Node
from ugro.policy.lifecycle.reported_run import StrangeRuns
from ugro.policy.nodes.health import assess
from ugro.policy.nodes.machines import Sighting, second_names, with_other_holders
from ugro.policy.scheduling.selection import Candidate, Choice, best_node
from ugro.store.database import Store

GpusOfNodes = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks our running jobs should have on a node, and how many its supervisors report alive."""

    expected: int = 0
    alive: int = 0


@dataclass(frozen=True, slots=True)
class _Probing:
    timeout_s: float
    patiently: bool


class HealthCheck:
    def __init__(self, cluster: Cluster, store: Store) -> None:
        self._cluster = cluster
        self._store = store
        # By node and not by name, so that a node that was changed or only examined leaves nothing behind.
        self._reports: WeakKeyDictionary[Node, tuple[float, NodeReport]] = WeakKeyDictionary()
        self._gpus: WeakKeyDictionary[Node, frozenset[str]] = WeakKeyDictionary()  # the UUIDs seen last
        self._agent_id: str | None = None
        self.ranks: Callable[[str], Ranks] = lambda node: Ranks()
        self.refusal: Callable[[str], RemoteFailure | None] = lambda node: None  # why a node refuses this agent
        # Of nodes with these GPUs, by uuid: how fast each was measured to be.
        self.speeds: Callable[[Callable[[], GpusOfNodes]], Mapping[str, float]] = lambda gpus: {}
        self.has_jobs: Callable[[str], bool] = lambda node: False  # whether some of our jobs hold devices there
        self.owner: Callable[[str], OwnerReport | None] = lambda node: None  # who uses it besides us
        self.power: Callable[[str], PowerReport | None] = lambda node: None  # whether it sleeps
        # The runs that it reports and that were never placed there.
        self.strange_runs: Callable[[str], StrangeRuns | None] = lambda node: None

    async def reports(
        self, nodes: Iterable[Node], *, timeout_s: float | None = None, patiently: bool = False
    ) -> AsyncGenerator[list[NodeReport]]:
        """Reports as they arrive, in batches: a slow node does not delay the others.

        ``patiently``: nobody waits for them, and a node that is dialled rarely is not dialled for them.
        """
        drained = await self._store.drained()
        limit_s = timeout_s or self._cluster.config.health_check.timeout
        how = _Probing(limit_s, patiently)
        checks = {
            asyncio.create_task(self._check(node, drained.get(node.spec.name), how), name=f"check {node.spec.name}")
            for node in nodes
        }
        try:
            while checks:
                done, checks = await asyncio.wait(checks, return_when=asyncio.FIRST_COMPLETED)
                seconds = self.second_names()
                found = [check.result() for check in done]
                yield [
                    replace(one, same_as=seconds.get(one.name), owner=self.owner(one.name), power=self.power(one.name))
                    for one in found
                ]
        finally:
            for check in checks:
                check.cancel()

    async def best(self, *, max_age_s: float) -> Choice | None:
        """The node with the lowest cost, from reports no older than ``max_age_s``."""
        reports = await self.recent(max_age_s=max_age_s)
        own = [report for report in reports if report.same_as is None]
        speeds = self.speeds(lambda: {one.name: tuple(gpu.uuid for gpu in one.facts.gpus) for one in own if one.facts})
        candidates = [replace(Candidate.of(report), speed=speeds.get(report.name, 1.0)) for report in own]
        settings = self._cluster.config.health_check
        return best_node(candidates, cpu_weight=settings.cpu_weight, gpu_weight=settings.gpu_weight)

    async def recent(self, *, max_age_s: float) -> list[NodeReport]:
        """A report of every node; nodes whose last one is older are asked again."""
        nodes = list(self._cluster.inventory)
        async for _ in self.reports(node for node in nodes if not self._is_fresh(node, max_age_s)):
            pass
        drained = await self._store.drained()
        seconds = self.second_names()
        # A drain takes effect at once, however old the report is; so does an owner who came.
        return [
            replace(
                report,
                drained=drained.get(report.name),
                same_as=seconds.get(report.name),
                owner=self.owner(report.name),
                power=self.power(report.name),
            )
            for _, report in (self._reports[node] for node in nodes if node in self._reports)
        ]

    def second_names(self, has_jobs: Callable[[str], bool] | None = None) -> dict[str, str]:
        """For each node that is another name for the machine of a node: the name under which that is used."""
        has_jobs = has_jobs or self.has_jobs
        boots = Counter(node.machine.boot_id for node in self._cluster.inventory if node.machine is not None)
        return second_names([one for one in self.sightings(has_jobs) if boots[one.machine.boot_id] > 1])

    def sightings(self, has_jobs: Callable[[str], bool]) -> list[Sighting]:
        """Of the nodes that have answered at least once."""
        return [
            Sighting(
                node.spec.name,
                node.machine,
                self._gpus.get(node, frozenset()),
                has_jobs=has_jobs(node.spec.name),
                is_reachable=node.link is not None,
            )
            for node in self._cluster.inventory
            if node.machine is not None
        ]

    async def drained(self) -> dict[str, str]:
        """The drained nodes, and the reasons given."""
        return await self._store.drained()

    def _is_fresh(self, node: Node, max_age_s: float) -> bool:
        """Whether the report is recent enough and the node's link has not broken since."""
        checked_at, report = self._reports.get(node, (float("-inf"), None))
        has_changed = report is not None and (node.link is None) == report.status.is_up
        return not has_changed and time.monotonic() - checked_at <= max_age_s

    async def _check(self, node: Node, drained: str | None, how: _Probing) -> NodeReport:
        report = await self._report(node, drained, how)
        self._reports[node] = (time.monotonic(), report)
        return report

    async def _report(self, node: Node, drained: str | None, how: _Probing) -> NodeReport:
        spec = node.spec
        if (power := self.power(spec.name)) is not None and not power.is_awake:
            return _asleep(node, power, drained)  # not dialled: that could wake it
        try:
            facts = await _probe(node, how)
            if (refusal := self.refusal(spec.name)) is not None:
                raise refusal
        except (Unreachable, TimedOut, RemoteFailure) as error:
            return _unreachable(node, error, drained)
        quality = node.quality
        ranks = self.ranks(spec.name)
        facts = replace(facts, rank_processes=ranks.alive)
        facts = with_other_holders(facts, await self._agent(), spec.name)
        if facts.gpu_error is None:
            self._gpus[node] = frozenset(gpu.uuid for gpu in facts.gpus if gpu.uuid)
        strange = self.strange_runs(spec.name)
        verdict = assess(facts, quality, ranks_expected=ranks.expected, strange_runs=str(strange) if strange else None)
        return NodeReport(
            name=spec.name,
            status=verdict.status,
            score=verdict.score,
            reasons=verdict.reasons,
            checked_at=_now(),
            drained=drained,
            role=spec.role,
            labels=spec.labels,
            target=spec.target,
            found_by=spec.found_by,
            machine=node.machine,
            facts=facts,
            link=quality,
        )

    async def _agent(self) -> str:
        if self._agent_id is None:
            self._agent_id = await self._store.agent_id()
        return self._agent_id


async def _probe(node: Node, how: _Probing) -> Facts:
    timeout_s = how.timeout_s
    # A node that is connecting gets the time that a connection may take: only then is the cause of a failure known.
    link = await node.ready(
        max(timeout_s, node.dialling.options.connect_timeout_s + 1), patiently=how.patiently
    )
    # The GPU reader times out first, so that a hung driver does not cost the other facts.
    try:
        answer = await link.call("probe", {"gpu_timeout_s": timeout_s * 0.8}, timeout_s=timeout_s)
    except TimedOut as error:
        hint = f"it hangs or is very busy (health_check.timeout sets the limit); look: ugro doctor {node.spec.name}"
        raise Unreachable(error.message, subject=node.spec.name, cause="timed-out", hint=hint) from error
    try:
        return decode(Facts, answer)
    except DecodeError as error:
        raise RemoteFailure(f"invalid probe result: {error}", subject=node.spec.name) from error


def _unreachable(node: Node, error: UgroError, drained: str | None) -> NodeReport:
    return replace(
        _absent(node, Status.UNREACHABLE, 0, drained),
        since=node.since.isoformat(timespec="seconds") if node.since else None,
        error=error.message,
        hint=error.hint,
        cause=error.cause if isinstance(error, Unreachable) else error.kind.replace("_", "-"),
    )


def _asleep(node: Node, power: PowerReport, drained: str | None) -> NodeReport:
    """Nothing is wrong with it, as far as known."""
    return _absent(node, Status(power.state.value), 100, drained)


def _absent(node: Node, status: Status, score: int, drained: str | None) -> NodeReport:
    """Of a node that was not probed."""
    spec = node.spec
    return NodeReport(
        name=spec.name,
        status=status,
        score=score,
        checked_at=_now(),
        drained=drained,
        role=spec.role,
        labels=spec.labels,
        target=spec.target,
        found_by=spec.found_by,
        machine=node.machine,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
