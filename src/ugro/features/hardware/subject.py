"""A node that is measured: its link, what a probe found, and the figures as they come."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ugro.features.hardware.model import (
    CPU,
    CpuFigures,
    DeviceFigures,
    Mode,
    NodeFigures,
    Part,
    Skipped,
    StorageFigures,
    Surroundings,
)
from ugro.features.hardware.node.bench import bench
from ugro.features.hardware.rules import OF_MACHINE
from ugro.kernel.links.calls import Stream, asked
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import Facts, Gpu, Machine
from ugro.kernel.support.codec import DecodeError, decode
from ugro.kernel.support.errors import RemoteFailure, UgroError
from ugro.node import foreign, wire

# --- lines ------------------------------------------------------------------------------------------------------------
# What a measuring process on a node writes, line by line, as types. A node is not trusted: all is bounded.


_LONGEST_TEXT = 300
_LARGEST = 1e18
_MOST_SKIPPED = 40
_MOST_DEVICES = 64
_WIDTHS = ("pcie_width", "pcie_width_max")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LinkLine:
    latency_s: float | None = None
    jitter_s: float | None = None
    bytes_per_s: float | None = None
    back_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class AllReduceLine:
    size_bytes: int
    seconds: float


class Lines:
    """Collects what one process says. ``on_phase`` hears what it is at."""

    def __init__(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self._on_phase = on_phase
        self.port: int | None = None
        self.torch: str | None = None
        self.gpus: int | None = None  # that PyTorch can use
        self.cpu: CpuFigures | None = None
        self.memory_bytes_per_s: float | None = None
        self.storage: StorageFigures | None = None
        self.link: LinkLine | None = None
        self.devices: list[DeviceFigures] = []  # as PyTorch numbers them: whose they are, the node does not say
        self.allreduces: list[AllReduceLine] = []
        self.skipped: list[Skipped] = []
        self.on_port: Callable[[], None] = lambda: None

    def take(self, line: bytes) -> None:
        """Raises ``DecodeError`` for what no process of ours writes."""
        try:
            said = foreign.parsed(line)
        except ValueError as error:
            raise DecodeError(f"invalid line: {error}") from None
        if not isinstance(said, dict):
            raise DecodeError("a line is not an object")
        for key, value in said.items():
            if (take := self._TAKE.get(key)) is not None:
                take(self, value)

    def skip(self, what: str, why: str) -> None:
        if len(self.skipped) < _MOST_SKIPPED:
            self.skipped.append(Skipped(printable(what), printable(why)))

    def _take_port(self, value: Any) -> None:
        if type(value) is not int or not 0 < value < 65536:
            raise DecodeError(f"expected a port, got {value!r:.40}")
        self.port = value
        self.on_port()

    def _take_torch(self, value: Any) -> None:
        self.torch = printable(str(value))[:40]

    def _take_gpus(self, value: Any) -> None:
        if type(value) is not int or not 0 <= value <= _MOST_DEVICES:
            raise DecodeError(f"expected a number of GPUs, got {value!r:.40}")
        self.gpus = value

    def _take_phase(self, value: Any) -> None:
        self._on_phase(printable(str(value))[:40])

    def _take_memory(self, value: Any) -> None:
        self.memory_bytes_per_s = _number(value)

    def _take_skipped(self, value: Any) -> None:
        found = decode(Skipped, value)
        self.skip(found.what, found.why)

    def _take_device(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise DecodeError("a device is not an object")
        widths = {name: value[name] for name in _WIDTHS if name in value}
        _decoded(Surroundings, widths)
        rest = {name: figure for name, figure in value.items() if name not in widths}
        found = _decoded(DeviceFigures, {**rest, "uuid": "", "name": "", "seen": widths})
        others = [one for one in self.devices if one.index != found.index]  # it has more figures now than before
        self.devices = [*others, found][:_MOST_DEVICES]

    def _take_allreduce(self, value: Any) -> None:
        found = _decoded(AllReduceLine, value)
        if not found.seconds or len(self.allreduces) >= _MOST_DEVICES:
            raise DecodeError("invalid all-reduce")
        self.allreduces.append(found)

    def _take_cpu(self, value: Any) -> None:
        self.cpu = _decoded(CpuFigures, value)

    def _take_storage(self, value: Any) -> None:
        self.storage = _decoded(StorageFigures, value)

    def _take_link(self, value: Any) -> None:
        self.link = _decoded(LinkLine, value)

    _TAKE: dict[str, Callable[[Lines, Any], None]] = {  # noqa: RUF012  # never changed
        "port": _take_port,
        "torch": _take_torch,
        "gpus": _take_gpus,
        "phase": _take_phase,
        "memory_bytes_per_s": _take_memory,
        "skipped": _take_skipped,
        "device": _take_device,
        "allreduce": _take_allreduce,
        "cpu": _take_cpu,
        "storage": _take_storage,
        "link": _take_link,
    }


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "�" for letter in text[:_LONGEST_TEXT])


def _decoded(kind: type[T], value: Any) -> T:
    found = decode(kind, value)
    for name in (one.name for one in dataclasses.fields(found)):  # type: ignore[arg-type]
        figure = getattr(found, name)
        if isinstance(figure, int | float):
            _number(figure)
    return found


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= _LARGEST:
        raise DecodeError(f"expected a figure, got {value!r:.40}")
    return float(value)


# --- process ----------------------------------------------------------------------------------------------------------
# One measuring process on a node: started, listened to, and ended in time, whatever it does.


_MOST_BYTES = 256 * 1024  # of one process
_KEPT_STDERR = 4096
_END_S = 5.0  # how long it may take until it is gone

# The names of parts, for people.
WORDS = {"listen": "network", "connect": "network", "allreduce": "all-reduce", "count": "all-reduce"}


async def run(link: Link, part: str, params: dict[str, Any], limit_s: float, lines: Lines) -> None:
    """Returns when the process is gone. Why it found less than it should have is among what was skipped."""
    process = _Process(link, part, lines)
    try:
        async with asyncio.timeout(limit_s):
            await process.follow(link.stream(*asked(bench, part=part, **params)))
    except TimeoutError:
        lines.skip(WORDS.get(part, part), "the time was up")
        await process.end()
    except DecodeError as error:
        lines.skip(WORDS.get(part, part), f"invalid figures from node: {error}")
    except RemoteFailure as error:
        lines.skip(WORDS.get(part, part), printable(error.message))
    finally:
        process.cancel()


class _Process:
    def __init__(self, link: Link, part: str, lines: Lines) -> None:
        self._link = link
        self._part = part
        self._lines = lines
        self._stream: Stream | None = None
        self._unread = b""
        self._complaint = b""
        self._heard = 0

    async def follow(self, stream: Stream) -> None:
        self._stream = stream
        async for kind, payload in stream:
            self._heard += len(payload)
            if self._heard > _MOST_BYTES:
                raise DecodeError(f"more than {_MOST_BYTES >> 10} KiB")
            if kind == wire.ERR:
                self._complaint = (self._complaint + payload)[-_KEPT_STDERR:]
                continue
            *whole, self._unread = (self._unread + payload).split(b"\n")
            for line in whole:
                # What the user's own Python prints when it starts is not ours.
                if line.startswith(b"{"):
                    self._lines.take(line)
        self._conclude(await stream.result())

    def _conclude(self, ended: dict[str, Any]) -> None:
        if ended.get("code") == 0:
            return
        how = f"signal {ended.get('signal')}" if ended.get("signal") else f"exit code {ended.get('code')}"
        said = self._complaint.decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = f"its process ended with {how}" + (f": {said}" if said else "")
        self._lines.skip(WORDS.get(self._part, self._part), why)

    async def end(self) -> None:
        """Waits until it is gone: what comes next must not be measured beside it."""
        if self._stream is not None:
            self._stream.ask_to_stop()
            with contextlib.suppress(UgroError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._stream.result()

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


# --- subject ----------------------------------------------------------------------------------------------------------


class Taken(Exception):
    """Its owner needs a node that is measured; the text says which and why."""


@dataclass(slots=True)
class Subject:
    name: str
    link: Link
    facts: Facts
    python: str | None = None  # the path of the one that has PyTorch; None: the one that runs the ranks
    found: list[Lines] = field(default_factory=list)
    asked: list[Lines] = field(default_factory=list)  # what is no figure of its own
    seen: dict[str, Surroundings] = field(default_factory=dict)  # by uuid, while it was measured
    is_busy: bool = False  # and measured all the same
    is_lost: bool = False
    taken: str | None = None  # why it is measured no longer, though it can be reached
    was_taken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_out(self) -> bool:
        return self.is_lost or self.taken is not None

    def make_way(self, sign: str | None) -> None:
        """Its owner has come. What was measured until then may be too low."""
        self.taken = f"its owner came ({sign})"
        self.is_busy = True
        self.was_taken.set()

    def lock(self, about: About, gpus: Collection[int]) -> dict[str, Any]:
        """For a process that uses these GPUs: that it must have their locks."""
        devices = [[gpu.index, gpu.uuid] for gpu in self.facts.gpus if gpu.index in gpus]
        return {"gpus": devices, "agent": about.agent, "node": self.name, "is_forced": about.is_forced}

    @property
    def machine(self) -> Machine:
        assert self.link.machine is not None  # the link is open
        return self.link.machine

    @property
    def torch(self) -> str | None:
        return next((lines.torch for lines in self.found if lines.torch), None)

    @property
    def cuda_devices(self) -> range | None:
        """The GPUs that PyTorch can use; None: nobody has asked it."""
        if not self.facts.gpus:
            return range(0)
        return next((range(one.gpus) for one in (*self.found, *self.asked) if one.gpus is not None), None)

    def note(self, gpus: tuple[Gpu, ...]) -> None:
        """What a probe has seen of its GPUs meanwhile."""
        for gpu in gpus:
            before = self.seen.get(gpu.uuid, Surroundings())
            hottest = max((t for t in (before.temperature_c, gpu.temperature_c) if t is not None), default=None)
            throttle = tuple(dict.fromkeys((*before.throttle, *(gpu.throttle or ()))))
            self.seen[gpu.uuid] = replace(before, temperature_c=hottest, throttle=throttle)

    def figures(self, about: About) -> NodeFigures:
        last: dict[str, Any] = {}
        for lines in self.found:
            last |= {
                name: value
                for name in ("cpu", "memory_bytes_per_s", "storage", "torch")
                if (value := getattr(lines, name)) is not None
            }
        devices = [self._device(device) for lines in self.found for device in lines.devices]
        return NodeFigures(
            node=self.name,
            measured_at=about.measured_at,
            mode=about.mode,
            driver=self.facts.gpu_driver,
            devices=tuple(device for device in devices if device is not None),
            skipped=(*(one for lines in self.found for one in lines.skipped), *self._silent(about)),
            is_forced=self.is_busy,
            **last,
        )

    def _device(self, device: DeviceFigures) -> DeviceFigures | None:
        """With its name, and what was seen of it meanwhile; None if the machine has no such device."""
        if device.index is None:
            return replace(device, uuid=CPU, name=self.machine.cpu_model)
        gpu = next((gpu for gpu in self.facts.gpus if gpu.index == device.index), None)
        if gpu is None:
            return None
        before = self.seen.get(gpu.uuid, Surroundings())
        seen = replace(before, pcie_width=device.seen.pcie_width, pcie_width_max=device.seen.pcie_width_max)
        return replace(device, uuid=gpu.uuid, name=gpu.name, seen=seen)

    def _silent(self, about: About) -> list[Skipped]:
        """What was lost with the link, or left out when its owner came."""
        if not self.is_out:
            return []
        parts = [part for part in (*OF_MACHINE, Part.DEVICES) if part in about.parts]
        return [Skipped(str(part), self.taken or "the node could not be reached any more") for part in parts]


@dataclass(frozen=True, slots=True)
class About:
    measured_at: str
    mode: Mode
    parts: frozenset[Part]
    agent: str = ""  # who measures
    is_forced: bool = False  # busy nodes, too


async def unless_taken(subjects: Sequence[Subject], work: Coroutine[Any, Any, T]) -> T:
    """Ends the work, and raises ``Taken``, when the owner of one of these nodes comes."""
    task = asyncio.create_task(work, name="measure")
    news = [asyncio.create_task(one.was_taken.wait(), name=f"owner of {one.name}") for one in subjects]
    try:
        await asyncio.wait([task, *news], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Taken("; ".join(f"{one.name}: {one.taken}" for one in subjects if one.taken))
    finally:
        for one in (task, *news):
            one.cancel()
        await asyncio.gather(task, *news, return_exceptions=True)
