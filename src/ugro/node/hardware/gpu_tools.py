"""Reads GPUs through the vendors' command-line tools: nvidia-smi, amd-smi and rocm-smi.

Used where the library cannot be loaded. The output differs between versions; what is not understood is ``None``.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ugro.node.hardware.gpu_facts import (
    UNKNOWN,
    Gpu,
    GpuProcess,
    Reading,
    SourceAbsentError,
    SourceError,
    gpu_process,
    unread_gpu,
)
from ugro.node.process import process_tree

TIMEOUT_S = 3.0
_MIB = 1024**2

# The PATH of an ssh login without a terminal often lacks these.
_TOOL_FOLDERS = ("/usr/lib/wsl/lib", "/opt/rocm/bin")

_NVIDIA_FIELDS = (
    "index",
    "pci.bus_id",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "enforced.power.limit",
    "driver_version",
)
_NVIDIA_ERRORS = {
    "[gpu is lost]": "the GPU is lost: it fell off the bus; a reboot may bring it back",
    "[gpu requires reset]": "the GPU needs a reset before it can be used again",
    "[unknown error]": "unknown driver error",
}
# Versions print "GPU 0000:02:00.0: GPU is lost.", "GPU0000:02:00.0: …", "GPU1: 0000:34:00.0: …" or "GPU1: …".
_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for GPU ?(?:(?P<index>\d{1,3}):(?= ))? ?"
    r"(?:(?P<bus>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]):)? *(?P<reason>.*)",
    re.IGNORECASE,
)
# Server parts have no edge sensor.
_AMD_TEMPERATURES = ("edge", "edge_temperature", "hotspot", "hotspot_temperature", "junction_temperature")


class NvidiaSmi:
    name = "nvidia-smi"

    def __init__(self) -> None:
        self._seen: Dict[str, Tuple[int, str, str]] = {}  # bus id → index, uuid, name

    def read(self) -> Reading:
        query = "--query-gpu=" + ",".join(_NVIDIA_FIELDS)
        output = _run("nvidia-smi", query, "--format=csv,noheader,nounits")
        rows = [row for row in _csv_rows(output.text) if len(row) == len(_NVIDIA_FIELDS) and row[0].isdigit()]
        gpus = [self._gpu(row) for row in rows]
        gpus += self._without_handle(output.text, {gpu["index"] for gpu in gpus})
        if not gpus and "no devices were found" not in output.text.lower():
            raise SourceError(output.complaint)
        if gpus:
            self._add_processes(gpus)
        return Reading(sorted(gpus, key=lambda gpu: gpu["index"]), _text(rows[0][-1]) if rows else None)

    def _gpu(self, row: List[str]) -> Gpu:
        index, bus = int(row[0]), _bus_key(row[1])
        _, uuid, name = self._seen.get(bus, (index, "", UNKNOWN))
        numbers = [_number(field) for field in row[4:10]]
        gpu = unread_gpu(index, _text(row[2]) or uuid, _text(row[3]) or name, _nvidia_error(row))
        gpu["memory_total_bytes"] = _scaled(numbers[0], _MIB)
        gpu["memory_used_bytes"] = _scaled(numbers[1], _MIB)
        gpu["use_ratio"] = _ratio(numbers[2])
        gpu["temperature_c"], gpu["power_w"], gpu["power_limit_w"] = numbers[3:]
        if gpu["uuid"]:
            self._seen[bus] = (index, gpu["uuid"], gpu["name"])
        return gpu

    def _without_handle(self, text: str, taken: set[int]) -> Iterator[Gpu]:
        """GPUs that nvidia-smi could not open: one line of text each, among the rows."""
        for line in text.splitlines():
            match = _NO_HANDLE.match(line.strip())
            if not match:
                continue
            index, uuid, name = self._seen.get(_bus_key(match["bus"] or ""), (None, "", UNKNOWN))
            if index is None or index in taken:
                index = int(match["index"]) if match["index"] else _first_free(taken)
            taken.add(index)
            reason = match["reason"].strip().lower()
            known = [words for mark, words in _NVIDIA_ERRORS.items() if mark.strip("[]") in reason]
            yield unread_gpu(index, uuid, name, known[0] if known else reason or "cannot be opened")

    def _add_processes(self, gpus: List[Gpu]) -> None:
        query = "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory"
        try:
            output = _run("nvidia-smi", query, "--format=csv,noheader,nounits")
        except SourceError:  # the GPUs themselves were read
            return
        by_uuid = {gpu["uuid"]: gpu for gpu in gpus}
        for row in _csv_rows(output.text):
            if len(row) == 4 and row[1].isdigit() and row[0] in by_uuid:
                name = os.path.basename(_text(row[2]) or "") or UNKNOWN
                process = gpu_process(int(row[1]), _scaled(_number(row[3]), _MIB), name)
                by_uuid[row[0]]["processes"].append(process)


class AmdSmi:
    name = "amd-smi"
    _STATIC_S = 60.0

    def __init__(self) -> None:
        self._static: Dict[int, Dict[str, Any]] = {}
        self._static_until = 0.0

    def read(self) -> Reading:
        metrics = _by_gpu(_run_json("amd-smi", "metric", "--json"))
        static = self._read_static()
        processes = self._processes()
        gpus = [
            _amd_gpu(index, metrics.get(index), static.get(index, {}), processes.get(index, []))
            for index in sorted({*metrics, *static})
        ]
        drivers = [_part(entry, "driver") for entry in static.values()]
        versions = (_text(_first(driver, "version", "driver_version")) for driver in drivers)
        return Reading(gpus, next(filter(None, versions), None))

    def _read_static(self) -> Dict[int, Dict[str, Any]]:
        """Cached, because each call of amd-smi takes about half a second and this part hardly changes."""
        if time.monotonic() >= self._static_until:
            self._static = _by_gpu(_run_json("amd-smi", "static", "--json"))
            self._static_until = time.monotonic() + self._STATIC_S
        return self._static

    def _processes(self) -> Dict[int, List[GpuProcess]]:
        try:
            entries = _by_gpu(_run_json("amd-smi", "process", "--json"))
        except SourceError:  # the GPUs themselves were read
            return {}
        found = [(index, *process) for index, entry in entries.items() for process in _amd_processes(entry)]
        # amd-smi lists a process at every GPU; if it has memory on some of them, it runs on those.
        placed = {pid for _, pid, _, memory in found if memory}
        processes: Dict[int, List[GpuProcess]] = {}
        for index, pid, name, memory in found:
            if memory or pid not in placed:
                processes.setdefault(index, []).append(gpu_process(pid, memory or None, name))
        return processes


class RocmSmi:
    name = "rocm-smi"
    _SHOW = (
        "--showid",
        "--showproductname",
        "--showuse",
        "--showmemuse",
        "--showmeminfo",
        "vram",
        "--showtemp",
        "--showpower",
        "--showmaxpower",
        "--showuniqueid",
        "--showbus",
        "--showdriverversion",
    )

    def read(self) -> Reading:
        document = _run_json("rocm-smi", *self._SHOW, "--json")
        if not isinstance(document, dict):
            raise SourceError("rocm-smi printed something unexpected")
        cards = {name: _lower(card) for name, card in document.items() if re.fullmatch(r"card\d+", name)}
        gpus = [_rocm_gpu(int(name[4:]), card) for name, card in cards.items()]
        driver = _text(_lower(document.get("system")).get("driver version"))
        return Reading(sorted(gpus, key=lambda gpu: gpu["index"]), driver)


class _Output:
    def __init__(self, tool: str, text: str, errors: str, code: int) -> None:
        self.text = text
        self._errors = errors
        self._code = code
        self._tool = tool

    @property
    def complaint(self) -> str:
        """The tool's error message: its last line of text."""
        lines = [line.strip() for line in (self.text + "\n" + self._errors).splitlines() if line.strip()]
        silence = "%s ended with code %d and no message" % (self._tool, self._code)
        return lines[-1][:300] if lines else silence


def _run(tool: str, *arguments: str) -> _Output:
    folders = [os.environ.get("PATH", os.defpath), *_TOOL_FOLDERS]
    path = shutil.which(tool, path=os.pathsep.join(folders))
    if path is None:
        raise SourceAbsentError("%s is not installed" % tool)
    try:
        process = subprocess.Popen(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
            preexec_fn=process_tree.die_with_parent,
        )
    except OSError as error:
        raise SourceError("%s cannot be started: %s" % (tool, error.strerror)) from error
    try:
        text, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise SourceError("%s gave no answer within %g s" % (tool, TIMEOUT_S)) from None
    return _Output(tool, text.decode(errors="replace"), errors.decode(errors="replace"), process.returncode)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Inside a hung driver even SIGKILL takes effect late; we do not wait.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=0.5)


def _run_json(tool: str, *arguments: str) -> Any:
    output = _run(tool, *arguments)
    for at in (match.start() for match in re.finditer(r"^[ \t]*[\[{]", output.text, re.MULTILINE)):
        # Warnings may come before and after the document, and may begin with a bracket too.
        with contextlib.suppress(ValueError, RecursionError):
            return json.JSONDecoder().raw_decode(output.text[at:].lstrip())[0]
    if "no amd gpus" in output.complaint.lower():
        return {}
    raise SourceError(output.complaint)


def _csv_rows(text: str) -> List[List[str]]:
    return [[field.strip() for field in row] for row in csv.reader(text.splitlines(), skipinitialspace=True)]


def _nvidia_error(row: List[str]) -> Optional[str]:
    marks = [field.lower() for field in row]
    return next((words for mark, words in _NVIDIA_ERRORS.items() if mark in marks), None)


def _bus_key(bus: str) -> str:
    """The PCI domain has four digits in messages and eight in rows."""
    return bus.lower()[-12:]


def _first_free(taken: set[int]) -> int:
    return next(index for index in range(len(taken) + 1) if index not in taken)


def _by_gpu(document: Any) -> Dict[int, Dict[str, Any]]:
    """A list of GPUs, since ROCm 7 inside ``gpu_data``."""
    if isinstance(document, dict):
        document = document.get("gpu_data", [])
    if not isinstance(document, list):
        raise SourceError("amd-smi printed something unexpected")
    entries = [entry for entry in document if isinstance(entry, dict)]
    return {int(entry["gpu"]): entry for entry in entries if str(entry.get("gpu", "")).isdigit()}


def _amd_gpu(
    index: int, metric: Optional[Dict[str, Any]], static: Dict[str, Any], processes: List[GpuProcess]
) -> Gpu:
    asic = _part(static, "asic")
    uuid = _amd_uuid(asic.get("asic_serial"), _part(static, "bus").get("bdf"))
    gpu = unread_gpu(index, uuid, _text(_first(asic, "market_name", "name")) or UNKNOWN)
    metric = metric or {}
    memory, temperature = _part(metric, "mem_usage", "fb_usage"), _part(metric, "temperature")
    size = _first(_part(static, "vram"), "size", "vram_size_mb", "vram_size")
    gpu["memory_total_bytes"] = _bytes(memory.get("total_vram"), "MB") or _bytes(size, "MB")
    gpu["memory_used_bytes"] = _bytes(memory.get("used_vram"), "MB")
    gpu["use_ratio"] = _ratio(_number(_first(_part(metric, "usage"), "gfx_activity", "gfx_usage")))
    gpu["temperature_c"] = _number(_first(temperature, *_AMD_TEMPERATURES))
    power = _part(metric, "power")
    gpu["power_w"] = _number(_first(power, "socket_power", "current_socket_power", "average_socket_power"))
    gpu["power_limit_w"] = _amd_power_limit(_part(static, "limit"))
    gpu["processes"] = processes
    return _with_silence_as_error(gpu)


def _amd_power_limit(limit: Dict[str, Any]) -> Optional[float]:
    newest = _part(limit, "ppt0")
    values = (newest.get("socket_power_limit"), limit.get("socket_power"), limit.get("power_limit"))
    highest = (newest.get("max_power_limit"), limit.get("max_power"))
    # Some versions print 0 if the limit is the maximum.
    return next((watts for watts in map(_number, (*values, *highest)) if watts), None)


def _amd_processes(entry: Dict[str, Any]) -> Iterator[Tuple[int, str, Optional[int]]]:
    for item in entry.get("process_list") or []:
        process = item.get("process_info") if isinstance(item, dict) else None
        if isinstance(process, dict) and str(process.get("pid", "")).isdigit():
            vram = _part(process, "memory_usage").get("vram_mem")
            memory = _bytes(vram, "B") or _bytes(process.get("mem_usage"), "B")
            yield int(process["pid"]), os.path.basename(_text(process.get("name")) or "") or UNKNOWN, memory


def _rocm_gpu(index: int, card: Dict[str, Any]) -> Gpu:
    names = (_text(card.get(key)) for key in ("card series", "device name", "card model"))
    name = next((name for name in names if name and not name.startswith("0x")), UNKNOWN)
    gpu = unread_gpu(index, _amd_uuid(card.get("unique id"), card.get("pci bus")), name)
    gpu["memory_total_bytes"] = _scaled(_number(card.get("vram total memory (b)")), 1)
    gpu["memory_used_bytes"] = _scaled(_number(card.get("vram total used memory (b)")), 1)
    gpu["use_ratio"] = _ratio(_number(card.get("gpu use (%)")))
    temperatures = {key: value for key, value in card.items() if key.startswith("temperature (sensor ")}
    wanted = ["temperature (sensor edge) (c)", "temperature (sensor junction) (c)", *temperatures]
    gpu["temperature_c"] = _number(_first(temperatures, *wanted))
    powers = [key for key in card if key.endswith("graphics package power (w)") and not key.startswith("max")]
    gpu["power_w"] = _number(_first(card, *powers))
    gpu["power_limit_w"] = _number(card.get("max graphics package power (w)"))
    return _with_silence_as_error(gpu)


def _amd_uuid(serial: Any, bus: Any) -> str:
    """The form that ROCR_VISIBLE_DEVICES takes. Consumer GPUs may have no serial; all have a bus address."""
    digits = str(serial or "").lower()
    digits = digits[2:] if digits.startswith("0x") else digits
    if re.fullmatch(r"[0-9a-f]+", digits) and digits.strip("0"):
        return "GPU-" + digits
    place = _text(bus)
    return "PCI-" + place.lower() if place else ""


def _with_silence_as_error(gpu: Gpu) -> Gpu:
    if gpu["memory_used_bytes"] is None and gpu["use_ratio"] is None and gpu["temperature_c"] is None:
        gpu["error"] = "the driver reports no readings for it"
    return gpu


def _part(entry: Dict[str, Any], *names: str) -> Dict[str, Any]:
    """The first of these keys that exists; a part that cannot be read is the text N/A."""
    return next((entry[name] for name in names if isinstance(entry.get(name), dict)), {})


def _first(entry: Dict[str, Any], *names: str) -> Any:
    return next((entry[name] for name in names if name in entry and _text(entry[name])), None)


def _lower(entry: Any) -> Dict[str, Any]:
    """rocm-smi changes the case of its keys between versions."""
    return {str(key).lower(): value for key, value in entry.items()} if isinstance(entry, dict) else {}


def _text(value: Any) -> Optional[str]:
    """None for each way to print "not available": N/A, [N/A], [Not Supported], N/A (Secondary die), nothing."""
    if isinstance(value, dict):
        value = value.get("value")
    text = "" if value is None else str(value).strip()
    return None if not text or text.startswith("[") or text.upper().startswith("N/A") else text


def _number(value: Any) -> Optional[float]:
    """From 42, "42", "42 W" or {"value": 42, "unit": "W"}."""
    match = re.match(r"-?\d+(\.\d+)?", _text(value) or "")
    return float(match[0]) if match else None


def _bytes(value: Any, default_unit: str) -> Optional[int]:
    unit = str(value.get("unit")) if isinstance(value, dict) else str(value).rpartition(" ")[2]
    scales = {"B": 1, "KB": 1024, "MB": _MIB, "GB": 1024 * _MIB}
    return _scaled(_number(value), scales.get(unit.upper()) or scales[default_unit])


def _scaled(number: Optional[float], scale: int) -> Optional[int]:
    return None if number is None else int(number * scale)


def _ratio(percent: Optional[float]) -> Optional[float]:
    return None if percent is None else percent / 100
