"""What a measuring process on a node writes, line by line, as types. A node is not trusted: all is bounded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ugro.core.figures import CpuFigures, DeviceFigures, Skipped, StorageFigures, Surroundings
from ugro.core.support.codec import DecodeError, decode
from ugro.remote import foreign

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
    for name in (field.name for field in dataclasses.fields(found)):  # type: ignore[arg-type]
        figure = getattr(found, name)
        if isinstance(figure, int | float):
            _number(figure)
    return found


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= _LARGEST:
        raise DecodeError(f"expected a figure, got {value!r:.40}")
    return float(value)
