"""GPUs, and the CPU of a node without any, with PyTorch: matrix products in each precision, memory, copies."""

from __future__ import annotations

import importlib
import os
import re
import statistics
import time
from datetime import timedelta
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from ugro.features.hardware.node.meter import end_of, rate, say, skip, times

# --- allreduce --------------------------------------------------------------------------------------------------------
# PyTorch's all-reduce, as one rank of several; the first rank decides how often, and says what it took.


_MOST = 200


def allreduce(params: Dict[str, Any]) -> None:
    if params.get("interface"):
        os.environ["GLOO_SOCKET_IFNAME"] = str(params["interface"])
        os.environ["NCCL_SOCKET_IFNAME"] = "=%s" % params["interface"]  # without the sign, all that begin with it
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    say(phase="importing PyTorch")
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    rank, world, limit = int(params["rank"]), int(params["world"]), timedelta(seconds=float(params["limit_s"]))
    place = "cpu"
    if params["backend"] == "nccl":
        place = "cuda:%d" % int(params["gpu"])
        torch.cuda.set_device(place)
    say(phase="all-reduce")
    store = dist.TCPStore(str(params["address"]), int(params["port"]), world, rank == 0, limit)
    dist.init_process_group(str(params["backend"]), store=store, rank=rank, world_size=world, timeout=limit)
    try:
        sizes = [int(size) for size in params["sizes"]]
        _Sizes(torch, dist, place, rank).measure(sizes, float(params["seconds"]), limit.total_seconds())
    finally:
        dist.destroy_process_group()


class _Sizes:
    def __init__(self, torch: Any, dist: Any, place: str, rank: int) -> None:
        self._torch = torch
        self._dist = dist
        self._place = place
        self._rank = rank

    def measure(self, sizes: List[int], seconds: float, limit_s: float) -> None:
        until = end_of(seconds, limit_s)
        expected_s, before = 0.0, 0
        for place, size in enumerate(sizes):
            left = until - time.monotonic()
            # From the size before; all ranks must do the same, so the first one decides.
            expected_s = expected_s * size / before if before else 0.0
            if not self._agreed(int(2 * expected_s <= left and left > 0)):
                if self._rank == 0:
                    skip("all-reduce of %d MB" % (size // 10**6), "there was no time left")
                continue
            expected_s, before = self._one_size(size, max(0.0, left / (len(sizes) - place))), size

    def _one_size(self, size: int, seconds: float) -> float:
        # Zeros: their sum stays as it is, however often it is made.
        values = self._torch.zeros(size // 4, device=self._place)
        self._reduce(values)  # opens connections
        first = times(lambda: self._reduce(values), 0.0)[0]
        count = self._agreed(max(1, min(_MOST, int(seconds / first) - 2)))
        found = times(lambda: self._reduce(values), float("inf"), count)
        if self._rank == 0:
            say(allreduce={"size_bytes": size, "seconds": statistics.median(found)})
        return statistics.median(found)

    def _reduce(self, values: Any) -> None:
        self._dist.all_reduce(values)
        if self._place != "cpu":
            self._torch.cuda.synchronize()

    def _agreed(self, number: int) -> int:
        value = self._torch.tensor([number], device=self._place)
        self._dist.broadcast(value, 0)
        return int(value.item())


# --- devices ----------------------------------------------------------------------------------------------------------


_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_LEAST_S = {"cuda": 0.004, "cpu": 0.03}  # of one product: shorter ones say more of the call than of the device
_LEAST_TIMED_S = 0.05
_MOST_CPU = 2048
_COPY_BYTES = 64 << 20
_MEMORY_BYTES = 256 << 20
_CPU_BF16 = ("amx_bf16", "avx512_bf16", "bf16")
_PCI = "/sys/bus/pci/devices"


def devices(params: Dict[str, Any]) -> None:
    torch, count = _torch()
    until = end_of(float(params["seconds"]), float(params["limit_s"]))
    if count < int(params["gpus"]):
        skip("devices", "PyTorch %s sees %d of %d GPUs" % (torch.__version__, count, int(params["gpus"])))
    if not count:
        Device(torch, "cpu", None).measure(until)
    for index in range(count):
        # What is left is shared by those that are left.
        share = (until - time.monotonic()) / (count - index)
        Device(torch, "cuda:%d" % index, index).measure(time.monotonic() + share)


def count(params: Dict[str, Any]) -> None:
    """Says only how many GPUs PyTorch can use."""
    _torch()


def _torch() -> Tuple[Any, int]:
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of the driver's own tools
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    say(phase="importing PyTorch")
    torch: Any = importlib.import_module("torch")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    say(torch=str(torch.__version__), gpus=gpus)
    return torch, gpus


class Device:
    def __init__(self, torch: Any, place: str, index: Optional[int]) -> None:
        self._torch = torch
        self._place = place
        self._index = index
        self._kind = "cpu" if index is None else "cuda"
        self._found: Dict[str, Any] = {"index": index}

    def measure(self, until: float) -> None:
        steps: List[Tuple[str, Callable[[float], float]]] = [
            ("fp32_tflops", lambda s: self._product(s, self._torch.float32)),
            ("tf32_tflops", self._tf32),
            ("bf16_tflops", lambda s: self._product(s, self._torch.bfloat16)),
            ("fp16_tflops", lambda s: self._product(s, self._torch.float16)),
            ("int8_tops", self._int8),
            ("memory_bytes_per_s", self._memory),
            ("to_device_bytes_per_s", lambda s: self._copy(s, to_device=True)),
            ("from_device_bytes_per_s", lambda s: self._copy(s, to_device=False)),
        ]
        if self._kind == "cpu":  # others are emulated there, and its memory is measured without PyTorch
            steps = [(name, step) for name, step in steps if name in ("fp32_tflops", "bf16_tflops")]
        able = [(name, step) for name, step in steps if self._lack(name) is None]
        for place, (name, step) in enumerate(able):
            say(phase="%s %s" % (self._place, name.partition("_")[0]))
            try:
                self._found[name] = step(max(0.05, (until - time.monotonic()) / (len(able) - place)))
                say(device=self._found)
            except RuntimeError as error:  # PyTorch's own: no memory, no kernel for this device
                skip("%s %s" % (self._place, name), str(error).partition("\n")[0])
        for name, _ in steps:
            lack = self._lack(name)
            if lack:
                skip("%s %s" % (self._place, name.partition("_")[0]), lack)
        if self._index is not None:
            self._found.update(pcie_width(self._torch.cuda.get_device_properties(self._index)))
        say(device=self._found)

    def _lack(self, name: str) -> Optional[str]:
        """Why this device does not have it."""
        if self._kind == "cpu":
            return _cpu_lack(name)
        major, minor = self._torch.cuda.get_device_capability(self._index)
        is_amd = bool(getattr(self._torch.version, "hip", None))
        if name == "tf32_tflops" and (is_amd or major < 8):
            return "the device has no TF32"
        if name == "bf16_tflops" and not is_amd and major < 8:
            return "the device has no BF16"
        if name == "int8_tops" and not is_amd and (major, minor) < (7, 5):
            return "the device has no INT8 units"
        return None

    def _product(self, seconds: float, kind: Any) -> float:
        """Tera-operations in a second, of the smallest product that keeps the device busy."""
        torch = self._torch
        make = (lambda n: torch.randn(n, n, device=self._place).to(kind)) if kind != torch.int8 else self._bytes
        multiply = torch.mm if kind != torch.int8 else (lambda a, b: torch._int_mm(a, b.t()))
        begun = time.perf_counter()
        for size in _SIZES:
            one, other = make(size), make(size)
            multiply(one, other)  # the first call chooses a kernel
            self._wait()
            start = time.perf_counter()
            multiply(one, other)
            self._wait()
            took = time.perf_counter() - start
            is_last = size >= _MOST_CPU and self._kind == "cpu"
            # The next one takes eight times as long, and is made twice before it is timed.
            if took >= _LEAST_S[self._kind] or is_last or 16 * took > seconds:
                break

        def step() -> int:
            multiply(one, other)
            self._wait()
            return 2 * size**3

        left = max(_LEAST_TIMED_S, seconds - (time.perf_counter() - begun))
        return rate(step, left) / 1e12

    def _bytes(self, size: int) -> Any:
        return self._torch.randint(-8, 8, (size, size), dtype=self._torch.int8, device=self._place)

    def _tf32(self, seconds: float) -> float:
        self._torch.set_float32_matmul_precision("high")
        try:
            return self._product(seconds, self._torch.float32)
        finally:
            self._torch.set_float32_matmul_precision("highest")

    def _int8(self, seconds: float) -> float:
        return self._product(seconds, self._torch.int8)

    def _memory(self, seconds: float) -> float:
        source = self._torch.ones(_MEMORY_BYTES // 4, device=self._place)
        target = self._torch.empty_like(source)

        def step() -> int:
            target.copy_(source)
            self._wait()
            return 2 * _MEMORY_BYTES  # a copy reads and writes

        step()
        return rate(step, seconds)

    def _copy(self, seconds: float, to_device: bool) -> float:
        host = self._torch.ones(_COPY_BYTES // 4).pin_memory()
        there = self._torch.empty(_COPY_BYTES // 4, device=self._place)
        source, target = (host, there) if to_device else (there, host)

        def step() -> int:
            target.copy_(source, non_blocking=True)
            self._wait()
            return _COPY_BYTES

        step()
        return rate(step, seconds)

    def _wait(self) -> None:
        if self._kind == "cuda":
            self._torch.cuda.synchronize(self._index)


def _cpu_lack(name: str) -> Optional[str]:
    return "the CPU has no BF16 instructions" if name == "bf16_tflops" and not cpu_flags() & set(_CPU_BF16) else None


def cpu_flags(path: str = "/proc/cpuinfo") -> Set[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", file.read(), re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def pcie_width(properties: Any, folder: str = _PCI) -> Dict[str, int]:
    """Asked right after copies: an idle device may narrow its link to save power."""
    place = "%04x:%02x:%02x.0" % tuple(
        getattr(properties, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    found = {}
    for name, file in (("pcie_width", "current_link_width"), ("pcie_width_max", "max_link_width")):
        try:
            with open(os.path.join(folder, place, file), encoding="ascii") as text:
                found[name] = int(text.read())
        except (OSError, ValueError):
            return {}
    return found
