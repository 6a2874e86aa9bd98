"""What ``ugro node bench`` measured: devices, CPU, memory, storage, the links between nodes, and all-reduces.

Rates are per second and in bytes, operations or samples as their names say; ``None`` means "not measured", never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ugro.kernel.agent.model import Finding


class Mode(StrEnum):
    QUICK = "quick"
    FULL = "full"


class Part(StrEnum):
    """What ``--only`` chooses from."""

    DEVICES = "devices"
    CPU = "cpu"
    MEMORY = "memory"
    STORAGE = "storage"
    NETWORK = "network"
    ALLREDUCE = "allreduce"


PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "int8")


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was not measured, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was seen of a GPU while it worked: it explains a low figure."""

    temperature_c: float | None = None  # the highest
    throttle: tuple[str, ...] = ()  # power, heat, hardware
    pcie_width: int | None = None
    pcie_width_max: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """One GPU, or the CPU as PyTorch uses it (``uuid`` is then ``cpu``). Matrix products, and copies."""

    uuid: str
    name: str
    index: int | None = None  # of a GPU
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    int8_tops: float | None = None
    memory_bytes_per_s: float | None = None
    to_device_bytes_per_s: float | None = None
    from_device_bytes_per_s: float | None = None
    seen: Surroundings = Surroundings()

    @property
    def is_gpu(self) -> bool:
        return self.uuid != CPU

    def rate(self, precision: str) -> float | None:
        """TFLOP/s, and for int8 TOP/s."""
        value: float | None = getattr(self, f"{precision}_tops" if precision == "int8" else f"{precision}_tflops")
        return value


CPU = "cpu"


@dataclass(frozen=True, slots=True)
class CpuFigures:
    """How much text the CPU compresses (zlib): the standard library measures it on every node alike."""

    one_core_bytes_per_s: float
    all_cores_bytes_per_s: float
    cores: int  # that could be used: fewer than the machine has where a quota or an affinity limits them


@dataclass(frozen=True, slots=True)
class StorageFigures:
    """Of the disk with UGRO's folder."""

    write_bytes_per_s: float | None = None  # with fsync
    read_bytes_per_s: float | None = None  # one after another
    random_reads_per_s: float | None = None  # 4 KiB each
    fsync_s: float | None = None  # one small write and its fsync
    is_cached: bool = False  # the file system cannot read past the page cache: reads say more than the disk can


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """One node's figures of one measurement."""

    node: str
    measured_at: str  # RFC 3339
    mode: Mode
    driver: str | None = None  # of its GPUs
    torch: str | None = None
    devices: tuple[DeviceFigures, ...] = ()
    cpu: CpuFigures | None = None
    memory_bytes_per_s: float | None = None  # copies within main memory
    storage: StorageFigures | None = None
    skipped: tuple[Skipped, ...] = ()
    is_forced: bool = False  # other work may have lowered them

    @property
    def gpus(self) -> tuple[DeviceFigures, ...]:
        return tuple(device for device in self.devices if device.is_gpu)

    @property
    def has_figures(self) -> bool:
        return bool(self.devices or self.cpu or self.memory_bytes_per_s or self.storage)

    def device(self, uuid: str) -> DeviceFigures | None:
        return next((device for device in self.devices if device.uuid == uuid), None)

    def completed_by(self, earlier: NodeFigures) -> NodeFigures:
        """With what was not measured this time."""
        return replace(
            self,
            driver=self.driver or earlier.driver,
            torch=self.torch or earlier.torch,
            devices=self.devices or earlier.devices,
            cpu=self.cpu or earlier.cpu,
            memory_bytes_per_s=self.memory_bytes_per_s or earlier.memory_bytes_per_s,
            storage=self.storage or earlier.storage,
        )


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """One TCP connection between two nodes, at the addresses at which ranks meet."""

    source: str
    target: str
    measured_at: str
    bytes_per_s: float | None = None  # source to target
    back_bytes_per_s: float | None = None
    latency_s: float | None = None  # there and back, the median
    jitter_s: float | None = None  # the mean difference of one to the next
    address: str = ""  # of the target
    error: str | None = None  # why there are no figures
    mode: Mode = Mode.QUICK
    is_forced: bool = False  # one of the nodes was busy

    def reversed(self) -> LinkFigures:
        """The same connection, seen from the other node. The address is only known of the first target."""
        return replace(
            self,
            source=self.target,
            target=self.source,
            bytes_per_s=self.back_bytes_per_s,
            back_bytes_per_s=self.bytes_per_s,
            address="",
        )


@dataclass(frozen=True, slots=True)
class AllReduceFigures:
    """PyTorch's all-reduce over a set of nodes, one rank for each device."""

    nodes: tuple[str, ...]
    backend: str  # gloo or nccl
    ranks: int
    size_bytes: int
    seconds: float  # of one, the median
    measured_at: str
    is_forced: bool = False  # one of the nodes was busy

    @property
    def bytes_per_s(self) -> float:
        """What each rank sends and receives in a ring, per second: comparable with a link's figure."""
        return 2 * (self.ranks - 1) / self.ranks * self.size_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class BestFigure:
    """The highest value of a figure that was ever measured on an idle node."""

    what: str
    value: float
    measured_at: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one ``ugro node bench`` found."""

    measured_at: str
    mode: Mode
    took_s: float
    nodes: tuple[NodeFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    allreduces: tuple[AllReduceFigures, ...] = ()
    skipped: tuple[Skipped, ...] = ()  # what is not about a single node
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a measurement is."""

    phase: str
    node: str = ""  # empty: all of them
    left_s: float | None = None  # at most, until all is over
