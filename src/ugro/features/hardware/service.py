"""Measures hardware on request, one measurement at a time on each node, and keeps what it found."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ugro.features.environments.service.node_envs import PythonEnvs
from ugro.features.hardware.bench import Bench
from ugro.features.hardware.model import (
    PRECISIONS,
    AllReduceFigures,
    BestFigure,
    DeviceFigures,
    LinkFigures,
    Measurement,
    Mode,
    NodeFigures,
    Part,
    Progress,
    Skipped,
)
from ugro.features.hardware.operations import (
    GetHardware,
    GetNodeHardware,
    Hardware,
    Measured,
    MeasureHardware,
    MeasuringProgress,
    NodeHardware,
)
from ugro.features.hardware.rules import all_series, busy, judge_figures, node_speeds, phases
from ugro.features.hardware.store import HardwareStore
from ugro.features.hardware.subject import About, Subject
from ugro.kernel.access.model import Caller
from ugro.kernel.agent.model import Finding
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.engine.scheduler_input import Holds
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.link import Link
from ugro.kernel.links.node import Identity, Node
from ugro.kernel.links.reports import HealthCheck
from ugro.kernel.operations.request import answers
from ugro.kernel.support.aio import together
from ugro.kernel.support.errors import NotAllowed, TimedOut, UgroError, Unreachable, UsageError
from ugro.kernel.support.moments import unix_seconds
from ugro.kernel.telemetry.prometheus_text import Family
from ugro.node.messages import Packages

# --- torch python -----------------------------------------------------------------------------------------------------
# Which Python on a node measures devices: one that has PyTorch.


_ASK_S = 5.0


async def find(link: Link, environments: PythonEnvs) -> str | None:
    """The path of its Python: of the environment that was used last and has it. None: the one that runs the ranks.

    That one comes first if it has PyTorch, and also if none has it: its error says what is missing.
    """
    own = await node_checks.packages(link, timeout_s=_ASK_S)
    if isinstance(own, Packages) and own.torch is not None:
        return None
    try:
        async with asyncio.timeout(_ASK_S):
            for one in await environments.list():
                if any(name.lower() == "torch" for name, _ in one.made.packages):
                    made = await environments.ready(one.made.name)  # marks it as used: nobody removes it now
                    return made.python if made is not None else None
    except (UgroError, TimeoutError):
        return None
    return None


# --- measured ---------------------------------------------------------------------------------------------------------
# What was measured of the nodes' hardware, in memory: scheduling, plans and alerts ask for it all the time.


class MeasuredHardware:
    def __init__(self, store: HardwareStore) -> None:
        self.store = store
        self.latest: Mapping[str, NodeFigures] = {}
        self._findings: dict[str, list[Finding]] = {}
        self._speeds: tuple[object, dict[str, float]] = (None, {})

    async def read(self) -> None:
        self.latest = await self.store.latest()
        for node in self.latest:
            await self._judge(node)

    async def record(self, measured: Measurement) -> None:
        measured = replace(measured, nodes=tuple(node for node in measured.nodes if node.has_figures))
        best = {node.node: _best(node) for node in measured.nodes if not node.is_forced}
        await self.store.record(measured, best)
        self.latest = await self.store.latest()
        for node in measured.nodes:
            await self._judge(node.node)

    async def forget(self, node: str) -> None:
        await self.store.forget(node)
        self._findings.pop(node, None)
        self.latest = await self.store.latest()

    def latest_of(self, node: str) -> NodeFigures | None:
        return self.latest.get(node)

    def findings(self, node: str) -> Sequence[Finding]:
        """What has become worse than it was."""
        return self._findings.get(node, ())

    def speeds(self, gpus: Callable[[], Mapping[str, tuple[str, ...]]]) -> dict[str, float]:
        """By node, relative to the others. ``gpus``: those that each has, by uuid."""
        if not self.latest:
            return {}
        nodes = gpus()
        key = (self.latest, nodes)
        if self._speeds[0] != key:
            self._speeds = (key, node_speeds(nodes, self.latest))
        return self._speeds[1]

    async def _judge(self, node: str) -> None:
        self._findings[node] = judge_figures(await self.store.history(node))


def _best(node: NodeFigures) -> list[BestFigure]:
    return [BestFigure(one.key, max(one.values), node.measured_at) for one in all_series([node])]


# --- service ----------------------------------------------------------------------------------------------------------


_HELD = "is being measured"
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

    @answers(MeasureHardware)
    async def measure(
        self, asked: MeasureHardware, caller: Caller
    ) -> AsyncGenerator[list[MeasuringProgress | Measured]]:
        nodes = self._cluster.inventory.select(asked.nodes)
        return self._measuring(nodes, Wish(asked.mode, frozenset(asked.parts), asked.force))

    @answers(GetHardware)
    async def get_hardware(self, asked: GetHardware, caller: Caller) -> Hardware:
        store, members = self._measured.store, {node.spec.name for node in self._cluster.inventory}
        return Hardware(
            tuple(figures for name, figures in self._measured.latest.items() if name in members),
            tuple(await store.links(members)),
            tuple(one for one in await store.allreduces() if set(one.nodes) <= members),
        )

    @answers(GetNodeHardware)
    async def get_node_hardware(self, asked: GetNodeHardware, caller: Caller) -> NodeHardware:
        store, name = self._measured.store, asked.name
        self._cluster.inventory.named(name)
        return NodeHardware(
            self._measured.latest_of(name),
            tuple(await store.history(name)),
            tuple(await store.best(name)),
            tuple(one for one in await store.links() if one.source == name),
            tuple(one for one in await store.allreduces() if name in one.nodes),
            tuple(self._measured.findings(name)),
        )

    async def _measuring(
        self, nodes: Sequence[Node], wish: Wish
    ) -> AsyncGenerator[list[MeasuringProgress | Measured]]:
        said: asyncio.Queue[Progress | None] = asyncio.Queue()
        task = asyncio.create_task(self._measure(nodes, wish, said), name="measure nodes")
        self._running.add(task)
        task.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while (progress := await said.get()) is not None:
                yield [MeasuringProgress(progress)]
            if task.cancelled():
                raise Unreachable("the agent is stopping", cause="stopped")
            yield [Measured(task.result())]
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
                python = await find(link, PythonEnvs(node, self._identity, connect_s))
        except (Unreachable, TimedOut) as error:
            return Skipped(name, error.message)
        [[report]] = [reports async for reports in self._health.reports([node])]
        if report.facts is None:
            return Skipped(name, report.error or "no answer")
        return Subject(name, link, report.facts, python)

    @contextlib.asynccontextmanager
    async def _yielding(self, subjects: Sequence[Subject]) -> AsyncIterator[None]:
        """A node whose owner comes meanwhile is measured no further; one who was there before was to be ignored."""
        owners = {one.name: self._health.notes.owner(one.name) for one in subjects}
        there = {name for name, owner in owners.items() if owner is not None and owner.is_there}
        absent = [one for one in subjects if one.name not in there]
        watch = asyncio.create_task(self._watch_owners(absent), name="look for owners of measured nodes")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])

    async def _watch_owners(self, subjects: Sequence[Subject]) -> None:
        notes = self._health.notes
        while True:
            seen = notes.owners_changed.count
            for one in subjects:
                owner = notes.owner(one.name)
                if one.taken is None and owner is not None and owner.is_there:
                    one.make_way(owner.sign)
            await notes.owners_changed.wait(seen)

    def _refuse(self, subjects: Sequence[Subject], gone: Sequence[Skipped], wish: Wish) -> None:
        if not subjects:
            raise Unreachable(f"{gone[0].what}: {gone[0].why}", hint="see: ugro doctor", cause="unreachable")
        has_jobs = self._engine.live.has_jobs_on
        found = []
        for one in subjects:
            if (why := busy(one.facts, self._health.notes.owner(one.name), has_jobs=has_jobs(one.name))) is not None:
                one.is_busy = True
                found.append(f"{one.name} {why}")
        if found and not wish.is_forced:
            hint = "wait, name other nodes, or measure all the same, with lower figures: --force"
            raise NotAllowed("; ".join(found), hint=hint)


# --- measured hardware ------------------------------------------------------------------------------------------------
# Measured hardware for Prometheus: what ``ugro node bench`` found last, and when.


_MOST_LINKS = 1000  # of a hundred nodes there would be ten thousand


def of_hardware(
    nodes: Mapping[str, NodeFigures], links: Iterable[LinkFigures], allreduces: Iterable[AllReduceFigures]
) -> Iterator[Family]:
    yield from _of_nodes(nodes)
    yield from _of_devices(nodes)
    yield from _of_links([one for one in links if one.error is None][:_MOST_LINKS])
    yield _of_allreduces(allreduces)


def _of_nodes(nodes: Mapping[str, NodeFigures]) -> Iterator[Family]:
    for name, words, value in _NODE_GAUGES:
        family = Family(name, "gauge", words)
        for node in nodes.values():
            family.add(value(node), node=node.node)
        yield family


_NODE_GAUGES: tuple[tuple[str, str, Callable[[NodeFigures], float | None]], ...] = (
    (
        "ugro_node_measured_time_seconds",
        "When a node's hardware was measured last, since the epoch.",
        lambda node: unix_seconds(node.measured_at),
    ),
    (
        "ugro_node_measured_cpu_bytes_per_second",
        "Text that all cores of a node compress.",
        lambda node: node.cpu.all_cores_bytes_per_s if node.cpu else None,
    ),
    (
        "ugro_node_measured_cpu_core_bytes_per_second",
        "Text that one core of a node compresses.",
        lambda node: node.cpu.one_core_bytes_per_s if node.cpu else None,
    ),
    (
        "ugro_node_measured_memory_bytes_per_second",
        "Copies within a node's main memory, read and written.",
        lambda node: node.memory_bytes_per_s,
    ),
    (
        "ugro_node_measured_storage_read_bytes_per_second",
        "Sequential reads from the disk with UGRO's folder.",
        lambda node: node.storage.read_bytes_per_s if node.storage else None,
    ),
    (
        "ugro_node_measured_storage_write_bytes_per_second",
        "Writes with fsync to the disk with UGRO's folder.",
        lambda node: node.storage.write_bytes_per_s if node.storage else None,
    ),
    (
        "ugro_node_measured_storage_random_reads_per_second",
        "Random reads of 4 KiB from the disk with UGRO's folder.",
        lambda node: node.storage.random_reads_per_s if node.storage else None,
    ),
    (
        "ugro_node_measured_storage_fsync_seconds",
        "One small write with fsync to the disk with UGRO's folder, the median.",
        lambda node: node.storage.fsync_s if node.storage else None,
    ),
)


def _of_devices(nodes: Mapping[str, NodeFigures]) -> Iterator[Family]:
    flops = Family(
        "ugro_node_measured_device_operations_per_second", "gauge", "Matrix products of a device, by precision."
    )
    memory = Family("ugro_node_measured_device_memory_bytes_per_second", "gauge", "Copies within a device's memory.")
    copies = Family(
        "ugro_node_measured_device_copy_bytes_per_second", "gauge", "Copies between main memory and a device."
    )
    for node in nodes.values():
        for device in node.devices:
            labels = {"node": node.node, "device": _name(device), "model": device.name}
            for precision in PRECISIONS:
                rate = device.rate(precision)
                flops.add(None if rate is None else rate * 1e12, **labels, precision=precision)
            memory.add(device.memory_bytes_per_s, **labels)
            copies.add(device.to_device_bytes_per_s, **labels, direction="to")
            copies.add(device.from_device_bytes_per_s, **labels, direction="from")
    yield from (flops, memory, copies)


def _of_links(links: Iterable[LinkFigures]) -> Iterator[Family]:
    speed = Family("ugro_node_measured_link_bytes_per_second", "gauge", "One TCP connection from a node to another.")
    latency = Family("ugro_node_measured_link_latency_seconds", "gauge", "Round trip between two nodes, the median.")
    jitter = Family(
        "ugro_node_measured_link_jitter_seconds", "gauge", "Mean difference of a round trip to the next one."
    )
    for one in links:
        speed.add(one.bytes_per_s, node=one.source, to=one.target)
        latency.add(one.latency_s, node=one.source, to=one.target)
        jitter.add(one.jitter_s, node=one.source, to=one.target)
    yield from (speed, latency, jitter)


def _of_allreduces(found: Iterable[AllReduceFigures]) -> Family:
    family = Family(
        "ugro_node_measured_allreduce_seconds", "gauge", "One all-reduce over a set of nodes, the median."
    )
    for one in found:
        family.add(one.seconds, nodes=",".join(sorted(one.nodes)), backend=one.backend, bytes=one.size_bytes)
    return family


def _name(device: DeviceFigures) -> str:
    return "cpu" if device.index is None else str(device.index)
