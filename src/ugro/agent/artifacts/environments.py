"""What is installed on the nodes of a job, recorded with its attempt.

To list the packages takes a node a second of one core: it is asked once at a time, and all who wait get the answer.
"""

from __future__ import annotations

import asyncio
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
from ugro.core.node import NodeSpec
from ugro.core.support.codec import DecodeError, decode, dumps
from ugro.nodes.link import Link
from ugro.remote import messages
from ugro.store.environments import EnvironmentStore

log = logging.getLogger(__name__)

# Environment variables that the ranks of a job get on a node beside their own, such as the folder to resume from.
ExtraEnv = Callable[[Job, str], Awaitable[Mapping[str, str]]]
_ANSWER_S = 30.0
_AGE_S = 300.0
_FAILED_AGE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What a node answered; None: nothing."""

    link: Link
    environment: Environment | None
    asked_at: float

    def is_usable(self, link: Link, since: float) -> bool:
        """Whether it was asked over this link, at that time or later."""
        return self.link is link and self.asked_at >= since


class Environments:
    def __init__(self, store: EnvironmentStore, watch: RunTracker) -> None:
        self._store = store
        self._watch = watch
        self._known: dict[str, _Known] = {}
        self._asking: dict[str, asyncio.Lock] = {}

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
            if job.spec.is_cached and job.spec.environment is None:  # else it was recorded when it was made
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
        wanted_at = time.monotonic()
        async with self._asking.setdefault(node, asyncio.Lock()):
            try:
                runs = self._watch.runs(node)
                link = await runs.node.ready(runs.connect_s, patiently=True)
                return (await self._answer(node, link, wanted_at, is_fresh)).environment
            except (Unreachable, TimedOut, NotFound) as error:
                log.info("the environment of the node is unknown: %s", error, extra={"node": node})
                return None

    async def _answer(self, node: str, link: Link, wanted_at: float, is_fresh: bool) -> _Known:
        """What the node was asked while we waited for our turn is also fresh."""
        known = self._known.get(node)
        if known is not None:
            age_s = _AGE_S if known.environment is not None else _FAILED_AGE_S
            if known.is_usable(link, wanted_at if is_fresh else wanted_at - age_s):
                return known
        asked_at = time.monotonic()
        try:
            found = await _asked(link)
        except (TimedOut, RemoteFailure) as error:
            log.info("the environment of the node is unknown: %s", error, extra={"node": node})
            found = None
        known = self._known[node] = _Known(link, found, asked_at)
        return known


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
        variables_hash(link.spec),
    )


def variables_hash(spec: NodeSpec) -> str | None:
    return hashlib.sha256(dumps(sorted(spec.env)).encode()).hexdigest()[:16] if spec.env else None
