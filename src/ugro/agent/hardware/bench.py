"""One measurement of some nodes, from the first question to the figures."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ugro.agent.hardware import allreduce
from ugro.agent.hardware.lines import Lines
from ugro.agent.hardware.network import Network
from ugro.agent.hardware.process import run
from ugro.agent.hardware.subject import About, Subject, Taken, unless_taken
from ugro.agent.support.aio import together
from ugro.agent.tracking import node_checks
from ugro.core.errors import UgroError, Unreachable
from ugro.core.figures import AllReduceFigures, LinkFigures, Measurement, NodeFigures, Progress, Skipped
from ugro.core.node import Facts, Role
from ugro.core.support.codec import DecodeError, decode
from ugro.policy.hardware.budget import OF_MACHINE, STORAGE_BYTES, Budget, phases
from ugro.policy.hardware.rounds import waves
from ugro.policy.nodes.connectivity import Apart, Meeting, meet
from ugro.remote.messages import Connections

_PORTS = (20000, 30000)  # below those that systems give out
_SETTLE_S = 0.25
_LOOK_S = 0.5
_LEAST_S = 0.3
_NO_ADDRESS = Apart("no address was found at which the nodes meet", "see: ugro doctor", "")

Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Map:
    """Who reaches whom, and where."""

    reached: dict[str, Connections | UgroError]
    meeting: Meeting | Apart
    port: int


class Bench:
    def __init__(self, subjects: Sequence[Subject], about: About, report: Report) -> None:
        # The master first: ranks meet there.
        self._subjects = sorted(subjects, key=lambda one: one.link.spec.role is not Role.MASTER)
        self._about = about
        self._report = report
        wanted = phases(about.parts, len(subjects))
        self._waves = waves({one.name: one.machine.boot_id or one.name for one in subjects})
        self._budget = Budget(about.mode, wanted, len(self._waves))
        self._begun = time.monotonic()
        self._links: list[LinkFigures] = []
        self._allreduces: list[AllReduceFigures] = []
        self._skipped: list[Skipped] = []

    async def run(self) -> Measurement:
        for phase in self._budget.phases:
            if phase in ("machine", "devices"):
                for turn, wave in enumerate(self._waves):
                    limit_s = self._limit_s(phase, turn)
                    await self._on_nodes(phase, [one for one in self._subjects if one.name in wave], limit_s)
        if {"network", "allreduce"} & set(self._budget.phases):
            await self._between_nodes([one for one in self._subjects if not one.is_out])
        return Measurement(
            self._about.measured_at,
            self._about.mode,
            time.monotonic() - self._begun,
            self._figures(),
            tuple(self._links),
            tuple(self._allreduces),
            tuple(self._skipped),
        )

    def _figures(self) -> tuple[NodeFigures, ...]:
        has_own = {"machine", "devices"} & set(self._budget.phases)
        return tuple(one.figures(self._about) for one in self._subjects) if has_own else ()

    def _limit_s(self, phase: str, turn: int = 0) -> float:
        self._budget.spent_s = time.monotonic() - self._begun
        return max(_LEAST_S, self._budget.limit_s(phase, turn))

    def _say(self, phase: str, node: str = "") -> None:
        left = max(0.0, self._budget.bound_s - (time.monotonic() - self._begun))
        self._report(Progress(phase, node, round(left, 1)))

    # --- single nodes ------------------------------------------------------------------------------------------

    async def _on_nodes(self, phase: str, subjects: Sequence[Subject], limit_s: float) -> None:
        measure = self._machine if phase == "machine" else self._devices
        await together(self._unless_out(one, measure(one, limit_s)) for one in subjects if not one.is_out)

    async def _unless_out(self, subject: Subject, work: Coroutine[Any, Any, None]) -> None:
        """A link that breaks ends this node's part, with the process on the node; so does its owner who comes."""
        try:
            await unless_taken([subject], work)
        except Unreachable:
            subject.is_lost = True
        except Taken:
            return  # the subject says so itself

    async def _machine(self, subject: Subject, limit_s: float) -> None:
        params = {
            "parts": [str(part) for part in OF_MACHINE if part in self._about.parts],
            "seconds": self._budget.aim_s("machine"),
            "storage_bytes": STORAGE_BYTES[self._about.mode],
        }
        await self._process(subject, "machine", params, limit_s)

    async def _devices(self, subject: Subject, limit_s: float) -> None:
        params = {
            "python": subject.python,
            "gpus": len(subject.facts.gpus),
            "seconds": self._budget.aim_s("devices"),
            "limit_s": limit_s,
            "lock": subject.lock(self._about, [gpu.index for gpu in subject.facts.gpus]),
        }
        async with _watching(subject):
            await self._process(subject, "devices", params, limit_s)

    async def _process(self, subject: Subject, part: str, params: dict[str, Any], limit_s: float) -> None:
        lines = Lines(partial(self._say, node=subject.name))
        subject.found.append(lines)
        await run(subject.link, part, params, limit_s, lines)

    # --- between nodes -----------------------------------------------------------------------------------------

    async def _between_nodes(self, subjects: Sequence[Subject]) -> None:
        if len(subjects) < 2:
            self._skipped.append(Skipped("network", "fewer than two nodes are left"))
            return
        self._say("looking where nodes reach each other")
        found = await _explored(subjects)
        if "network" in self._budget.phases:
            network = Network({one.name: one for one in subjects}, found.reached, self._about)
            aim_s, limit_s = self._budget.aim_s("network"), self._limit_s("network")
            self._links = await network.measure(aim_s, limit_s, self._say)
            self._skipped += network.skipped
        if "allreduce" in self._budget.phases:
            self._say("all-reduce")
            try:
                self._allreduces, skipped = await unless_taken(subjects, self._allreduced(subjects, found))
            except (Unreachable, Taken) as error:
                skipped = [Skipped(allreduce.WHAT, str(error))]
            self._skipped += skipped

    async def _allreduced(
        self, subjects: Sequence[Subject], found: _Map
    ) -> tuple[list[AllReduceFigures], list[Skipped]]:
        await allreduce.ask(subjects, self._limit_s("allreduce") / 2)
        times = allreduce.Times(self._budget.aim_s("allreduce"), self._limit_s("allreduce"))
        return await allreduce.measure(subjects, found.meeting, found.port, times, self._about)


async def _explored(subjects: Sequence[Subject]) -> _Map:
    """Which addresses nodes have for each other, as before the launch of a job."""
    port = random.randrange(*_PORTS)
    links = [one.link for one in subjects]
    async with node_checks.mesh(links, [node_checks.endpoint(link) for link in links], port) as nodes:
        if nodes.failed:
            text = "; ".join(str(error) for error in nodes.failed.values())
            return _Map({}, Apart(text, "see: ugro doctor", next(iter(nodes.failed))), port)
        reached = await nodes.connect(_SETTLE_S)
        own = {name: one for name, one in reached.items() if isinstance(one, Connections)}
        is_whole = len(own) == len(subjects) and not nodes.taken_ports
        return _Map(dict(reached), meet(nodes.endpoints, port, own) if is_whole else _NO_ADDRESS, port)


@contextlib.asynccontextmanager
async def _watching(subject: Subject) -> AsyncIterator[None]:
    """Looks at the GPUs meanwhile: how hot they become, and what slows them down."""
    if not subject.facts.gpus:
        yield
        return
    watch = asyncio.create_task(_watch(subject), name=f"watch GPUs of {subject.name}")
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait([watch])


async def _watch(subject: Subject) -> None:
    while True:
        with contextlib.suppress(UgroError, DecodeError):
            answer = await subject.link.call("probe", {"gpu_timeout_s": 2.0}, timeout_s=3.0)
            subject.note(decode(Facts, answer).gpus)
        await asyncio.sleep(_LOOK_S)
