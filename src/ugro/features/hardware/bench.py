"""One measurement of some nodes, from the first question to the figures."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ugro.features.hardware.model import AllReduceFigures, LinkFigures, Measurement, NodeFigures, Progress, Skipped
from ugro.features.hardware.node.bench import NO_IMPORT
from ugro.features.hardware.rules import OF_MACHINE, SIZES_BYTES, STORAGE_BYTES, Budget, Pair, phases, rounds, waves
from ugro.features.hardware.subject import About, Lines, LinkLine, Subject, Taken, run, unless_taken
from ugro.kernel.links import checks as node_checks
from ugro.kernel.links.calls import asked
from ugro.kernel.links.diagnosis import LOOPBACK, Apart, Meeting, meet
from ugro.kernel.links.model import Facts, Role
from ugro.kernel.support.aio import together
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import UgroError, Unreachable
from ugro.node.main import probe
from ugro.node.messages import Connections

# --- allreduce --------------------------------------------------------------------------------------------------------
# PyTorch's all-reduce over all nodes that are measured, one rank for each device.


WHAT = "all-reduce"
_MOST_SKIPPED = 5  # ranks mostly say the same


@dataclass(frozen=True, slots=True)
class Rank:
    subject: Subject
    gpu: int | None


@dataclass(frozen=True, slots=True)
class Times:
    aim_s: float
    limit_s: float


async def ask(subjects: Sequence[Subject], limit_s: float) -> None:
    """How many GPUs PyTorch can use, where that matters and is not known: they may not have been measured."""
    unknown = [one for one in subjects if one.cuda_devices is None]
    if all(one.facts.gpus for one in subjects):
        await together(_ask(one, limit_s) for one in unknown)


async def _ask(subject: Subject, limit_s: float) -> None:
    lines = Lines()
    subject.asked.append(lines)
    await run(subject.link, "count", {"python": subject.python}, limit_s, lines)


async def measure(
    subjects: Sequence[Subject], meeting: Meeting | Apart, port: int, times: Times, about: About
) -> tuple[list[AllReduceFigures], list[Skipped]]:
    """``meeting``: of the first one, where all others reach it."""
    if isinstance(meeting, Apart):
        return [], [Skipped(WHAT, meeting.text)]
    # If devices were measured, it is known who lacks PyTorch; otherwise it turns out now.
    if lacking := [one.name for one in subjects if _lacks_torch(one)]:
        return [], [Skipped(WHAT, f"PyTorch is not there on {', '.join(lacking)}")]
    # With gloo instead, the figure would be far lower than the one of the GPUs, which it would replace.
    if silent := _silent(subjects):
        return [], [Skipped(WHAT, f"how many GPUs PyTorch can use is not known on {', '.join(silent)}")]
    ranks = ranks_of(subjects)
    backend = "gloo" if ranks[0].gpu is None else "nccl"
    interfaces = dict(meeting.interfaces)
    common = {
        "address": meeting.address,
        "port": port,
        "world": len(ranks),
        "backend": backend,
        "sizes": SIZES_BYTES,
        "seconds": times.aim_s,
        "limit_s": times.limit_s,
    }
    heard = [Lines() for _ in ranks]
    await together(
        run(rank.subject.link, "allreduce", _params(common, number, rank, interfaces, about), times.limit_s, lines)
        for number, (rank, lines) in enumerate(zip(ranks, heard, strict=True))
    )
    nodes = tuple(one.name for one in subjects)
    is_busy = any(one.is_busy for one in subjects)
    found = [
        AllReduceFigures(nodes, backend, len(ranks), line.size_bytes, line.seconds, about.measured_at, is_busy)
        for line in heard[0].allreduces
    ]
    skipped = dict.fromkeys(_named(one) for lines in heard for one in lines.skipped)
    return found, list(skipped)[:_MOST_SKIPPED]


def _named(skipped: Skipped) -> Skipped:
    """A size by its name; all else is about all sizes."""
    return skipped if skipped.what.startswith(WHAT) else Skipped(WHAT, skipped.why)


def ranks_of(subjects: Sequence[Subject]) -> list[Rank]:
    """One for each GPU if all nodes have some that PyTorch can use, else one for each node."""
    if all(one.cuda_devices for one in subjects):
        return [Rank(one, gpu) for one in subjects for gpu in one.cuda_devices or ()]
    return [Rank(one, None) for one in subjects]


def _params(
    common: dict[str, Any], number: int, rank: Rank, interfaces: dict[str, str], about: About
) -> dict[str, Any]:
    own = {"rank": number, "gpu": rank.gpu, "python": rank.subject.python}
    lock = rank.subject.lock(about, [] if rank.gpu is None else [rank.gpu])
    return {**common, **own, "lock": lock, "interface": interfaces.get(rank.subject.name)}


def _lacks_torch(subject: Subject) -> bool:
    return any(one.why.startswith(NO_IMPORT) for lines in (*subject.found, *subject.asked) for one in lines.skipped)


def _silent(subjects: Sequence[Subject]) -> list[str]:
    """Nodes with GPUs that nobody knows the number of, if that decides about the backend."""
    found = [one.name for one in subjects if one.cuda_devices is None]
    return found if all(one.cuda_devices is None or one.cuda_devices for one in subjects) else []


# --- network ----------------------------------------------------------------------------------------------------------
# The links between nodes: every pair once, in rounds in which no node takes part twice.


_LEAST_S = 0.2  # of one pair: less says nothing
_START_S = 0.15  # of a process on a node; two, one after the other, for each pair
_SLACK_S = 2.0  # a busy node starts late, and a slow link still empties its buffers after its time


class Network:
    def __init__(
        self, subjects: Mapping[str, Subject], reached: Mapping[str, Connections | UgroError], about: About
    ) -> None:
        self._subjects = subjects
        self._reached = reached
        self._about = about
        self.skipped: list[Skipped] = []

    async def measure(self, aim_s: float, limit_s: float, on_round: Callable[[str], None]) -> list[LinkFigures]:
        all_rounds = rounds(list(self._subjects))
        each_s = max(_LEAST_S, aim_s / max(1, len(all_rounds)) - 2 * _START_S)
        fitting = all_rounds[: max(1, int(limit_s / (each_s + 2 * _START_S)))]
        found: list[LinkFigures] = []
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        for place, pairs in enumerate(fitting):
            if loop.time() >= until:
                fitting = fitting[:place]
                break
            on_round(f"network, round {place + 1} of {len(fitting)}")
            found += await together(self._unless_taken(pair, each_s) for pair in pairs)
        left = sum(len(pairs) for pairs in all_rounds[len(fitting) :])
        if left:
            whole = left + len(found)
            self.skipped.append(Skipped("network", f"{left} of {whole} pairs of nodes: the time was up"))
        return found

    async def _unless_taken(self, pair: Pair, seconds: float) -> LinkFigures:
        try:
            return await unless_taken([self._subjects[name] for name in pair], self._pair(pair, seconds))
        except Taken as taken:
            return self._figures(pair, "", None, str(taken))

    async def _pair(self, pair: Pair, seconds: float) -> LinkFigures:
        source, target = (self._subjects[name] for name in pair)
        address = self._address(*pair)
        if address is None:
            return self._figures(pair, "", None, f"{pair[0]} does not reach {pair[1]}")
        listening, connecting = Lines(), Lines()
        port = asyncio.Event()
        listening.on_port = port.set
        limit_s = seconds + _SLACK_S
        given = {"address": address, "secret": secrets.token_hex(16), "limit_s": limit_s, "seconds": seconds}
        listener = asyncio.create_task(
            run(target.link, "listen", given, 2 * limit_s, listening), name=f"listen on {target.name}"
        )
        try:
            if await _is_open(port, listener, limit_s):
                await run(source.link, "connect", {**given, "port": listening.port}, limit_s, connecting)
        except Unreachable as error:
            connecting.skip("network", str(error))
        finally:
            listener.cancel()
            await asyncio.wait([listener])
            _ = listener.cancelled() or listener.exception()  # the connector says what matters
        why = next((one.why for lines in (connecting, listening) for one in lines.skipped), None)
        return self._figures(pair, address, connecting.link, why)

    def _figures(self, pair: Pair, address: str, line: LinkLine | None, why: str | None) -> LinkFigures:
        line = line or LinkLine()
        return LinkFigures(
            source=pair[0],
            target=pair[1],
            measured_at=self._about.measured_at,
            bytes_per_s=line.bytes_per_s,
            back_bytes_per_s=line.back_bytes_per_s,
            latency_s=line.latency_s,
            jitter_s=line.jitter_s,
            address=address,
            error=(why or "nothing was measured") if line.back_bytes_per_s is None else None,
            mode=self._about.mode,
            is_forced=any(self._subjects[name].is_busy for name in pair),
        )

    def _address(self, source: str, target: str) -> str | None:
        """Where ``source`` has reached ``target``; of pairs that were not tried, where others have."""
        own = self._reached.get(source)
        if isinstance(own, Connections):
            if (found := _first_address([own], target)) is not None:
                return found
            if any(missed.node == target for missed in own.missed):
                return None
        others = [one for one in self._reached.values() if isinstance(one, Connections)]
        found = _first_address(others, target)
        return None if found == LOOPBACK else found


def _first_address(connections: Sequence[Connections], target: str) -> str | None:
    return next((one.address for found in connections for one in found.reached if one.node == target), None)


async def _is_open(port: asyncio.Event, listener: asyncio.Task[None], limit_s: float) -> bool:
    opened = asyncio.create_task(port.wait())
    try:
        await asyncio.wait([opened, listener], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return port.is_set()
    finally:
        opened.cancel()


# --- bench ------------------------------------------------------------------------------------------------------------


_PORTS = (20000, 30000)  # below those that systems give out
_SETTLE_S = 0.25
_LOOK_S = 0.5
_BENCH_LEAST_S = 0.3
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
        return max(_BENCH_LEAST_S, self._budget.limit_s(phase, turn))

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
                skipped = [Skipped(WHAT, str(error))]
            self._skipped += skipped

    async def _allreduced(
        self, subjects: Sequence[Subject], found: _Map
    ) -> tuple[list[AllReduceFigures], list[Skipped]]:
        await ask(subjects, self._limit_s("allreduce") / 2)
        times = Times(self._budget.aim_s("allreduce"), self._limit_s("allreduce"))
        return await measure(subjects, found.meeting, found.port, times, self._about)


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
            answer = await subject.link.call(*asked(probe, gpu_timeout_s=2.0), timeout_s=3.0)
            subject.note(decode(Facts, answer).gpus)
        await asyncio.sleep(_LOOK_S)
