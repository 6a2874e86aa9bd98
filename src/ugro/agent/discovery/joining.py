"""Tries candidates: opens a link to each, which ssh refuses unless the host key is one that the user has accepted.

A candidate that cannot join is tried again after a growing pause: too many failed logins get an address banned.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace

from ugro.agent.ops.hosts import Hosts
from ugro.agent.tracking.health import HealthCheck
from ugro.config.schema import Config
from ugro.core.discovery import Candidate
from ugro.core.node import NodeReport, Status
from ugro.nodes.discovery.candidates import spec_of
from ugro.policy.lifecycle.backoff import delay_s
from ugro.policy.nodes.machines import Sighting, is_same_machine

_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 900.0


@dataclass(frozen=True, slots=True)
class _Try:
    candidate: Candidate
    failures: int
    again_at: float  # monotonic
    refusal: str  # why it did not join


class Joining:
    def __init__(self, hosts: Hosts, health: HealthCheck) -> None:
        self._hosts = hosts
        self._health = health
        self._tries: dict[str, _Try] = {}

    def refusals(self) -> dict[str, str]:
        return {name: one.refusal for name, one in self._tries.items()}

    def due(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those to be tried now: new ones, those that have changed, and those whose pause is over."""
        now = time.monotonic()
        return [one for one in candidates if (last := self._last(one)) is None or last.again_at <= now]

    def try_all_again(self) -> None:
        """A key was accepted."""
        self._tries = {name: replace(one, again_at=float("-inf")) for name, one in self._tries.items()}

    def forget_all_but(self, names: Collection[str]) -> None:
        self._tries = {name: one for name, one in self._tries.items() if name in names}

    async def reports(self, candidates: Sequence[Candidate], config: Config) -> AsyncGenerator[list[NodeReport]]:
        """What each of them is; ``same_as`` names the node that is the same machine."""
        specs = [spec_of(one, config) for one in candidates]
        async with contextlib.aclosing(self._hosts.examine(specs)) as batches:
            async for batch in batches:
                yield [replace(report, same_as=self._node_of(report)) for report in batch]

    async def able(self, candidates: Sequence[Candidate], config: Config) -> AsyncGenerator[Candidate]:
        """Tries them, and yields those that can join."""
        by_name = {one.name: one for one in candidates}
        async with contextlib.aclosing(self.reports(candidates, config)) as batches:
            async for batch in batches:
                for report in batch:
                    candidate = by_name[report.name]
                    if (refusal := refusal_of(report)) is None:
                        self._tries.pop(report.name, None)
                        yield candidate
                    else:
                        self._note(candidate, refusal)

    def _last(self, candidate: Candidate) -> _Try | None:
        known = self._tries.get(candidate.name)
        return known if known is not None and known.candidate.reach == candidate.reach else None

    def _note(self, candidate: Candidate, refusal: str) -> None:
        last = self._last(candidate)
        failures = (last.failures if last else 0) + 1
        pause_s = delay_s(failures, random.random(), base_s=_FIRST_PAUSE_S, cap_s=_LONGEST_PAUSE_S)
        self._tries[candidate.name] = _Try(candidate, failures, time.monotonic() + pause_s, refusal)

    def _node_of(self, report: NodeReport) -> str | None:
        if report.machine is None or report.facts is None:
            return None
        gpus = frozenset(gpu.uuid for gpu in report.facts.gpus if gpu.uuid)
        own = Sighting(report.name, report.machine, gpus)
        nodes = self._health.sightings(lambda node: False)
        return next((node.name for node in nodes if node.name != own.name and is_same_machine(own, node)), None)


def refusal_of(report: NodeReport) -> str | None:
    """Why a candidate cannot join; None if it can: it has answered over a link, so its host key is known."""
    if report.cause == "host-key-unknown":
        return f"host key not accepted: ugro node trust {report.name}"
    if report.status is Status.UNREACHABLE:
        return report.error or "is unreachable"
    return f"the same machine as {report.same_as}" if report.same_as else None
