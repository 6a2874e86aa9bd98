"""What is installed on the nodes of a job, recorded with its attempt."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from ugro.agent.support.aio import together
from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.environment import Environment
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.core.job import Job
from ugro.core.support.codec import DecodeError, decode, dumps
from ugro.nodes.link import Link
from ugro.remote import messages
from ugro.store.environments import EnvironmentStore

log = logging.getLogger(__name__)

# Environment variables that the ranks of a job get on a node beside their own, such as the folder to resume from.
ExtraEnv = Callable[[Job, str], Awaitable[Mapping[str, str]]]
_ANSWER_S = 30.0
_AGE_S = 300.0


@dataclass(frozen=True, slots=True)
class _Known:
    link: Link
    environment: Environment
    asked_at: float


class Environments:
    def __init__(self, store: EnvironmentStore, watch: RunTracker) -> None:
        self._store = store
        self._watch = watch
        self._known: dict[str, _Known] = {}

    async def record(self, job: Job) -> None:
        """Once for each attempt and node."""
        nodes = job.placement.nodes if job.placement else ()
        recorded = await self._store.of(job.id, job.attempt)
        found = await self.now([node for node in nodes if node not in recorded], is_fresh=False)
        if found:
            await self._store.record(job.id, job.attempt, found)

    def recording(self, ask: ExtraEnv) -> ExtraEnv:
        """As ``ask``; records the environment first if the result of the job may be reused."""

        async def asked(job: Job, node: str) -> Mapping[str, str]:
            if job.spec.is_cached:
                found = await self.now([node], is_fresh=True)
                await self._store.record(job.id, job.attempt, found)
            return await ask(job, node)

        return asked

    async def of(self, job: Job) -> dict[str, Environment]:
        """By node, of its newest attempt."""
        return await self._store.of(job.id, job.attempt)

    async def now(self, nodes: Iterable[str], *, is_fresh: bool) -> dict[str, Environment]:
        """Of nodes that answer. ``is_fresh``: asked now, and not some minutes ago."""
        names = list(nodes)
        found = await together(self._ask(node, is_fresh) for node in names)
        return {node: one for node, one in zip(names, found, strict=True) if one is not None}

    async def _ask(self, node: str, is_fresh: bool) -> Environment | None:
        try:
            runs = self._watch.runs(node)
            link = await runs.node.ready(runs.connect_s)
            known = self._known.get(node)
            is_known = known is not None and known.link is link and time.monotonic() - known.asked_at < _AGE_S
            if known is None or not is_known or is_fresh:
                known = self._known[node] = _Known(link, await _asked(link), time.monotonic())
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            log.info("the environment of the node is unknown: %s", error, extra={"node": node})
            return None
        return known.environment


async def _asked(link: Link) -> Environment:
    answer = await link.call("check", {"what": "environment", "timeout_s": 0.9 * _ANSWER_S}, timeout_s=_ANSWER_S)
    try:
        found = decode(messages.Environment, answer)
    except DecodeError as error:
        raise RemoteFailure(f"invalid answer about packages: {error}", subject=link.spec.name) from error
    assert link.machine is not None  # the link is open
    return Environment(
        found.python,
        link.machine.python_path,
        link.machine.arch,
        tuple(sorted(found.packages)),
        found.torch_cuda,
        found.gpu_driver,
        hashlib.sha256(dumps(sorted(link.spec.env)).encode()).hexdigest()[:16] if link.spec.env else None,
    )
