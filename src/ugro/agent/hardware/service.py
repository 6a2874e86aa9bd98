"""Measures hardware on request, one measurement at a time on each node, and keeps what it found."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ugro.agent.engine.reconciler import Engine
from ugro.agent.hardware import torch_python
from ugro.agent.hardware.bench import Bench
from ugro.agent.hardware.subject import About, Subject
from ugro.agent.support.aio import together
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.health import HealthCheck
from ugro.agent.tracking.holds import Holds
from ugro.agent.tracking.measured import MeasuredHardware
from ugro.core.errors import NotAllowed, TimedOut, Unreachable, UsageError
from ugro.core.figures import Measurement, Mode, Part, Progress, Skipped
from ugro.nodes.node import Node
from ugro.nodes.python_envs import PythonEnvs
from ugro.nodes.runs import Identity
from ugro.policy.hardware.budget import phases
from ugro.policy.hardware.busy import busy

_HELD = "is being measured"
_LOOK_S = 0.25
_WITH_TORCH = frozenset({Part.DEVICES, Part.ALLREDUCE})


@dataclass(frozen=True, slots=True)
class Wish:
    mode: Mode = Mode.FULL
    parts: frozenset[Part] = frozenset(Part)
    is_forced: bool = False


class HardwareService:
    def __init__(
        self,
        cluster: Cluster,
        health: HealthCheck,
        engine: Engine,
        holds: Holds,
        measured: MeasuredHardware,
        identity: Identity,
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._health = health
        self._engine = engine
        self._holds = holds
        self._measured = measured
        self._running: set[asyncio.Task[Measurement]] = set()

    @property
    def running(self) -> int:
        return len(self._running)

    def cancel(self) -> None:
        """Ends all measurements: the agent stops."""
        for task in self._running:
            task.cancel()

    async def measure(self, nodes: Sequence[Node], wish: Wish) -> AsyncGenerator[list[dict[str, object]]]:
        """``{"progress": …}`` as it goes on, then one ``{"measurement": …}``. Closing it ends what runs on nodes."""
        said: asyncio.Queue[Progress | None] = asyncio.Queue()
        task = asyncio.create_task(self._measure(nodes, wish, said), name="measure nodes")
        self._running.add(task)
        task.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while (progress := await said.get()) is not None:
                yield [{"progress": progress}]
            if task.cancelled():
                raise Unreachable("the agent is stopping", cause="stopped")
            yield [{"measurement": task.result()}]
        finally:
            self._running.discard(task)
            task.cancel()
            await asyncio.wait([task])

    async def _measure(self, nodes: Sequence[Node], wish: Wish, said: asyncio.Queue[Progress | None]) -> Measurement:
        if not wish.parts:
            raise UsageError("there is nothing to measure", hint=f"choose from: {', '.join(Part)}")
        nodes, others = self._distinct(nodes)
        if not phases(wish.parts, len(nodes)):
            raise UsageError("links and all-reduces need two nodes", hint="name more nodes, or measure other parts")
        said.put_nowait(Progress("asking the nodes"))
        with self._holds.hold([node.spec.name for node in nodes], _HELD):
            async with self._engine.scheduling:
                pass  # starts that were decided before the hold are recorded now
            found = await together(self._visit(node, wish) for node in nodes)
            subjects = [one for one in found if isinstance(one, Subject)]
            gone = [one for one in found if isinstance(one, Skipped)]
            self._refuse(subjects, gone, wish)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            about = About(now, wish.mode, wish.parts, self._identity.agent, wish.is_forced)
            async with self._yielding(subjects):
                measured = await Bench(subjects, about, said.put_nowait).run()
        await self._measured.record(measured)
        findings = [finding for one in measured.nodes for finding in self._measured.findings(one.node)]
        return replace(measured, skipped=(*others, *gone, *measured.skipped), findings=tuple(findings))

    def _distinct(self, nodes: Sequence[Node]) -> tuple[list[Node], list[Skipped]]:
        """Each machine once."""
        seconds = self._health.second_names()
        others = [Skipped(node.spec.name, f"is the same machine as {seconds[node.spec.name]}")
                  for node in nodes if node.spec.name in seconds]  # fmt: skip
        own = [node for node in nodes if node.spec.name not in seconds]
        if not own:
            raise UsageError(f"{others[0].what} {others[0].why}", hint="measure it by that name")
        return own, others

    async def _visit(self, node: Node, wish: Wish) -> Subject | Skipped:
        name = node.spec.name
        try:
            connect_s = 2 * self._cluster.config.ssh.connect_timeout + 1
            link = await node.ready(connect_s)
            python = None
            if wish.parts & _WITH_TORCH:
                python = await torch_python.find(link, PythonEnvs(node, self._identity, connect_s))
        except (Unreachable, TimedOut) as error:
            return Skipped(name, error.message)
        [[report]] = [reports async for reports in self._health.reports([node])]
        if report.facts is None:
            return Skipped(name, report.error or "no answer")
        return Subject(name, link, report.facts, python)

    @contextlib.asynccontextmanager
    async def _yielding(self, subjects: Sequence[Subject]) -> AsyncIterator[None]:
        """A node whose owner comes meanwhile is measured no further; one who was there before was to be ignored."""
        owners = {one.name: self._health.owner(one.name) for one in subjects}
        there = {name for name, owner in owners.items() if owner is not None and owner.is_there}
        absent = [one for one in subjects if one.name not in there]
        watch = asyncio.create_task(self._watch_owners(absent), name="look for owners of measured nodes")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])

    async def _watch_owners(self, subjects: Sequence[Subject]) -> None:
        while True:
            for one in subjects:
                owner = self._health.owner(one.name)
                if one.taken is None and owner is not None and owner.is_there:
                    one.make_way(owner.sign)
            await asyncio.sleep(_LOOK_S)

    def _refuse(self, subjects: Sequence[Subject], gone: Sequence[Skipped], wish: Wish) -> None:
        if not subjects:
            raise Unreachable(f"{gone[0].what}: {gone[0].why}", hint="see: ugro doctor", cause="unreachable")
        has_jobs = self._engine.live.has_jobs_on
        found = []
        for one in subjects:
            if (why := busy(one.facts, self._health.owner(one.name), has_jobs=has_jobs(one.name))) is not None:
                one.is_busy = True
                found.append(f"{one.name} {why}")
        if found and not wish.is_forced:
            hint = "wait, name other nodes, or measure all the same, with lower figures: --force"
            raise NotAllowed("; ".join(found), hint=hint)
