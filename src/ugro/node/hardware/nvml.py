"""Reads GPUs through NVIDIA's management library (NVML) with ctypes.

A GPU that cannot be read stays in the list with its error and does not affect the others. Calls can hang or crash
with the driver, so only the sampler's own process makes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, TypeVar

from ugro.node.hardware.gpu_facts import UNKNOWN, Gpu, GpuProcess, Reading, SourceAbsentError, SourceError, gpu_process

T = TypeVar("T")

_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")

_UNINITIALIZED, _NOT_SUPPORTED, _NO_PERMISSION, _INSUFFICIENT_SIZE = 1, 3, 4, 7
_DRIVER_NOT_LOADED, _FUNCTION_NOT_FOUND, _GPU_IS_LOST, _RESET_REQUIRED = 9, 13, 15, 16
_VERSION_MISMATCH, _NO_DATA, _GPU_NOT_FOUND, _UNKNOWN_ERROR = 18, 21, 28, 999

_UNSUPPORTED = (_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND, _NO_DATA)
_BROKEN = (_UNINITIALIZED, _DRIVER_NOT_LOADED, _VERSION_MISMATCH)
# Every further read of such a GPU may take seconds and will fail.
_GONE = (_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND)

_WORDS = {
    _UNINITIALIZED: "the NVIDIA library lost its driver",
    2: "the driver rejects the query",
    _NO_PERMISSION: "no permission to use the NVIDIA driver",
    6: "the driver does not find the GPU",
    8: "a power cable of the GPU is not connected",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    10: "the driver timed out",
    11: "the kernel has a problem with the GPU's interrupts",
    14: "the GPU's own configuration memory is corrupted",
    _GPU_IS_LOST: "the GPU is lost: it fell off the bus; a reboot may bring it back",
    _RESET_REQUIRED: "the GPU needs a reset before it can be used again",
    17: "the driver is blocked by the operating system",
    _VERSION_MISMATCH: "the NVIDIA library and the loaded driver differ; reboot or reload the driver",
    20: "out of memory",
    _GPU_NOT_FOUND: "the GPU is lost: the driver no longer finds it",
    _UNKNOWN_ERROR: "unknown driver error",
}

# Not included: idle, fixed clocks and GPUs that wait for each other, which are no problems to fix.
_THROTTLE = {"power": 0x04 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x08}
_TEXT_BYTES = 96
_MEMORY_NOT_AVAILABLE = 2**64 - 1
_UNTOUCHED = b"\xaa"
_SLOT_BYTES = 32  # the largest entry that any driver writes
_MAX_PROCESSES = 1 << 16


class NvmlError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(_WORDS.get(code, "driver error %d" % code))
        self.code = code


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _ProcessHead(ctypes.Structure):
    """The fields that all versions of a process entry begin with."""

    _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong)]


class _Identity(NamedTuple):
    uuid: str
    name: str


class Nvml:
    """Opens the library at the first read and remembers the GPUs it has seen."""

    name = "nvml"

    def __init__(self) -> None:
        self._library: Optional[_Library] = None
        self._seen: Dict[int, _Identity] = {}

    def read(self) -> Reading:
        try:
            if self._library is None:
                self._library = _open()
            return self._read_or_restart(self._library)
        except NvmlError as error:
            raise SourceError(str(error)) from error

    def _read_or_restart(self, library: _Library) -> Reading:
        try:
            return self._read_all(library)
        except NvmlError as error:
            if error.code not in _BROKEN:
                raise
        library.restart()
        return self._read_all(library)

    def _read_all(self, library: _Library) -> Reading:
        driver = library.driver()
        gpus = [self._read_gpu(library, index) for index in range(library.count())]
        for gpu in gpus:
            if gpu["uuid"]:
                self._seen[gpu["index"]] = _Identity(gpu["uuid"], gpu["name"])
        self._name_unread(gpus)
        return Reading(gpus, driver)

    def _read_gpu(self, library: _Library, index: int) -> Gpu:
        device = _Device(library, index)
        # First, because a driver may still know the identity of a GPU that it can no longer read.
        uuid = device.attempt("UUID", library.uuid)
        name = device.attempt("name", library.model)
        memory = device.attempt("memory", library.memory)
        return {
            "index": index,
            "uuid": uuid or "",
            "name": name or UNKNOWN,
            "memory_total_bytes": memory[0] if memory else None,
            "memory_used_bytes": memory[1] if memory else None,
            "use_ratio": device.attempt("utilisation", library.use_ratio),
            "temperature_c": device.attempt("temperature", library.temperature_c),
            "power_w": device.attempt("power", library.power_w),
            "power_limit_w": device.attempt("power limit", library.power_limit_w),
            "energy_j": device.attempt("energy", library.energy_j),
            "throttle": device.attempt("throttle reasons", library.throttle),
            "processes": _merged(
                device.attempt("processes", lambda handle: library.processes("Compute", handle)) or [],
                device.attempt("processes", lambda handle: library.processes("Graphics", handle)) or [],
            ),
            "error": device.error,
            "holder": None,
        }

    def _name_unread(self, gpus: List[Gpu]) -> None:
        # After a driver reload the other GPUs may have moved up: an identity in use is not given twice.
        taken = {gpu["uuid"] for gpu in gpus}
        for gpu in gpus:
            identity = self._seen.get(gpu["index"])
            if not gpu["uuid"] and identity and identity.uuid not in taken:
                gpu["uuid"], gpu["name"] = identity


class _Device:
    """Reads one GPU value by value and keeps the first error other than "not supported"."""

    def __init__(self, library: _Library, index: int) -> None:
        self.error: Optional[str] = None
        self._handle: Optional[ctypes.c_void_p] = ctypes.c_void_p()
        self._handle = self.attempt("handle", lambda _: library.handle(index))

    def attempt(self, what: str, read: Callable[[ctypes.c_void_p], T]) -> Optional[T]:
        if self._handle is None:
            return None
        try:
            return read(self._handle)
        except NvmlError as error:
            if error.code in _BROKEN:
                raise
            self._note(what, error)
            return None

    def _note(self, what: str, error: NvmlError) -> None:
        if error.code in _GONE:
            self._handle = None
            self.error = str(error)
        elif error.code not in _UNSUPPORTED or what == "handle":
            self.error = self.error or "cannot read its %s: %s" % (what, error)


class _Library:
    """The C functions, typed. Each raises ``NvmlError``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._call("nvmlInit_v2")

    def restart(self) -> None:
        with contextlib.suppress(NvmlError):  # the library is broken: only the error of init matters
            self._call("nvmlShutdown")
        self._call("nvmlInit_v2")

    def driver(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def count(self) -> int:
        return self._number("nvmlDeviceGetCount_v2")

    def handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def uuid(self, handle: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetUUID", handle)

    def model(self, handle: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetName", handle)

    def memory(self, handle: ctypes.c_void_p) -> Tuple[int, int]:
        """Total and used bytes."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return int(memory.total), int(memory.used)

    def use_ratio(self, handle: ctypes.c_void_p) -> float:
        use = _Utilization()
        self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use))
        return float(use.gpu / 100)

    def temperature_c(self, handle: ctypes.c_void_p) -> float:
        core_sensor = ctypes.c_uint(0)
        return float(self._number("nvmlDeviceGetTemperature", handle, core_sensor))

    def power_w(self, handle: ctypes.c_void_p) -> float:
        return self._number("nvmlDeviceGetPowerUsage", handle) / 1000

    def power_limit_w(self, handle: ctypes.c_void_p) -> float:
        return self._number("nvmlDeviceGetEnforcedPowerLimit", handle) / 1000

    def energy_j(self, handle: ctypes.c_void_p) -> float:
        """Counted by the GPU itself; those before Volta do not."""
        millijoules = ctypes.c_ulonglong(0)
        self._call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def throttle(self, handle: ctypes.c_void_p) -> List[str]:
        reasons = ctypes.c_ulonglong(0)
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
        return [word for word, bits in _THROTTLE.items() if reasons.value & bits]

    def processes(self, kind: str, handle: ctypes.c_void_p) -> List[Tuple[int, Optional[int]]]:
        """Pid and GPU memory of each process. Drivers before 510 lack v3, those before 460 also v2."""
        for version, entry_bytes in (("_v3", 24), ("_v2", 24), ("", 16)):
            try:
                function = "nvmlDeviceGet%sRunningProcesses%s" % (kind, version)
                return self._process_entries(function, handle, entry_bytes)
            except NvmlError as error:
                if error.code != _FUNCTION_NOT_FOUND:
                    raise
        raise NvmlError(_FUNCTION_NOT_FOUND)

    def _process_entries(
        self, function: str, handle: ctypes.c_void_p, entry_bytes: int
    ) -> List[Tuple[int, Optional[int]]]:
        room = 32
        while room <= _MAX_PROCESSES:
            size = room * _SLOT_BYTES
            buffer = ctypes.create_string_buffer(_UNTOUCHED * size, size)
            count = ctypes.c_uint(room)
            try:
                self._call(function, handle, ctypes.byref(count), buffer)
            except NvmlError as error:
                if error.code != _INSUFFICIENT_SIZE:
                    raise
                room = max(count.value, room) * 2  # more processes may start before the next call
                continue
            return _entries(buffer.raw, count.value, entry_bytes)
        raise NvmlError(_INSUFFICIENT_SIZE)

    def _text(self, function: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(function, *arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace")

    def _number(self, function: str, *arguments: Any) -> int:
        number = ctypes.c_uint()
        self._call(function, *arguments, ctypes.byref(number))
        return number.value

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise NvmlError(_FUNCTION_NOT_FOUND) from None
        if code != 0:
            raise NvmlError(code)


def _open() -> _Library:
    wanted = os.environ.get("UGRO_NVML_LIBRARY")
    paths = (wanted,) if wanted else _LIBRARIES
    for path in paths:
        try:
            return _Library(ctypes.CDLL(path))
        except OSError as error:
            reason = str(error)
            is_missing = "No such file" in reason and os.path.basename(path) in reason
            if wanted or not is_missing:
                raise SourceError(reason) from error
    raise SourceAbsentError("libnvidia-ml.so.1 is not installed")


def _entries(raw: bytes, count: int, entry_bytes: int) -> List[Tuple[int, Optional[int]]]:
    # Some 535 drivers write entries of 32 bytes although their header declares 24: use what was written.
    written = len(raw.rstrip(_UNTOUCHED))
    if count * entry_bytes < written <= count * _SLOT_BYTES:
        entry_bytes = _SLOT_BYTES
    entries = []
    for number in range(count):
        head = _ProcessHead.from_buffer_copy(raw, number * entry_bytes)
        entries.append((head.pid, None if head.memory == _MEMORY_NOT_AVAILABLE else head.memory))
    return entries


def _merged(*lists: List[Tuple[int, Optional[int]]]) -> List[GpuProcess]:
    """A process that computes and renders is in both lists, each time with all its memory."""
    memory: Dict[int, Optional[int]] = {}
    for pid, used in (entry for entries in lists for entry in entries):
        known = memory.get(pid)
        memory[pid] = used if known is None else max(known, used or 0)
    return [gpu_process(pid, used) for pid, used in memory.items()]
