"""Simulated GPUs: a file of GPUs, and a stub NVIDIA library or ``nvidia-smi`` that serves them to a node.

Such a node needs ``UGRO_NVML_LIBRARY`` (from ``build_nvml_stub``) and ``UGRO_PRETEND_GPUS`` (the file).
Without a compiler: the folder of ``write_nvidia_smi`` first on its PATH, and ``UGRO_NVML_LIBRARY`` naming no
library, so that a real one is not used. The file may change at any time.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import UgroError, UsageError

# --- shape ------------------------------------------------------------------------------------------------------------
# The shape of a lab: its nodes, their speeds, and how they are slowed down. No side effects.


MOST_NODES = 64
MOST_GPUS = 16
DEFAULT_SPEEDS = (1.0, 0.5, 0.25)
# Below this, starting a node program takes longer than the agent waits.
LEAST_SPEED = 0.02


class Throttle(StrEnum):
    CGROUP = "cgroup"
    DUTY_CYCLE = "duty-cycle"


@dataclass(frozen=True, slots=True)
class LabNode:
    name: str
    speed: float
    home: str
    throttle: Throttle
    cgroup: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A lab as created, and as recorded in its file."""

    nodes: tuple[LabNode, ...]
    gpus: int = 0  # simulated GPUs per node

    @property
    def speeds(self) -> tuple[float, ...]:
        return tuple(node.speed for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user requested. ``None`` keeps the existing value, or the default."""

    nodes: int | None = None
    speeds: tuple[float, ...] | None = None
    gpus: int | None = None
    without_cgroups: bool = False
    takes_precedence: bool = False  # over other programs on this machine, for a short-lived lab

    def wanted_speeds(self) -> tuple[float, ...]:
        """One speed per node; missing ones repeat the last."""
        count = self._count()
        if not 1 <= count <= MOST_NODES:
            raise UsageError(f"a lab has 1 to {MOST_NODES} nodes, not {count}")
        if self.speeds is None:
            return _filled(DEFAULT_SPEEDS[:count], count)
        if len(self.speeds) > count:
            raise UsageError(
                f"{len(self.speeds)} speeds for {_nodes(count)}", hint=f"give fewer, or --nodes {len(self.speeds)}"
            )
        return _filled(self.speeds, count)

    def wanted_gpus(self) -> int:
        gpus = self.gpus or 0
        if not 0 <= gpus <= MOST_GPUS:
            raise UsageError(f"a lab node has 0 to {MOST_GPUS} simulated GPUs, not {gpus}")
        return gpus

    def is_granted_by(self, shape: Shape) -> bool:
        has_speeds = (self.nodes is None and self.speeds is None) or self.wanted_speeds() == shape.speeds
        has_gpus = self.gpus is None or self.gpus == shape.gpus
        is_slowed_so = not self.without_cgroups or all(
            node.throttle is Throttle.DUTY_CYCLE for node in shape.nodes
        )
        return has_speeds and has_gpus and is_slowed_so

    def _count(self) -> int:
        if self.nodes is not None:
            return self.nodes
        return len(DEFAULT_SPEEDS if self.speeds is None else self.speeds)


def parse_speeds(text: str) -> tuple[float, ...]:
    return tuple(_speed(part.strip()) for part in text.split(","))


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not LEAST_SPEED <= speed <= 1:
        raise UsageError(
            f"{text!r} is not a speed: a number from {LEAST_SPEED:g} to 1",
            hint="1 is a whole core, 0.25 a quarter of one: --speeds 1,0.5,0.25",
        )
    return speed


def _filled(speeds: tuple[float, ...], count: int) -> tuple[float, ...]:
    return (*speeds, *[speeds[-1]] * (count - len(speeds)))


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


# --- simulated gpus ---------------------------------------------------------------------------------------------------


GPU_IS_LOST = 15  # NVML's code for a GPU that fell off the bus
GROWS = "*"

_GIB = 1024**3
_COMPILE_TIMEOUT_S = 60
_STUB_SOURCE = Path(__file__).with_name("nvml_stub.c")


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """``None`` means not supported by the driver. Without a ``uuid``, one is derived from file and line."""

    name: str = "NVIDIA GeForce RTX 4070"
    uuid: str = ""
    memory_total_bytes: int | None = 8 * _GIB
    memory_used_bytes: int | None = _GIB // 4
    use_percent: int | None = 0
    temperature_c: int | None = 38
    power_w: float | None = 15.0
    power_limit_w: float | None = 200.0
    error: int = 0  # an NVML return code
    processes: tuple[tuple[int, int | None], ...] = ()  # pid and bytes
    throttle: int | None = None  # NVML's bit mask
    # What it has used since its driver was loaded; ``GROWS``: as much as its power makes of the machine's uptime.
    energy_j: float | str | None = GROWS


def _model(name: str, memory_gib: int, power_limit_w: float) -> SimulatedGpu:
    return SimulatedGpu(name, memory_total_bytes=memory_gib * _GIB, power_limit_w=power_limit_w)


SIMULATED_MODELS = {
    "rtx-5070-ti": _model("NVIDIA GeForce RTX 5070 Ti Laptop GPU", 12, 140.0),
    "rtx-4070": _model("NVIDIA GeForce RTX 4070 Laptop GPU", 8, 115.0),
    "rtx-3070-ti": _model("NVIDIA GeForce RTX 3070 Ti", 8, 290.0),
    "v100": _model("Tesla V100-SXM2-16GB", 16, 300.0),
}


def write_gpus(path: Path, gpus: Sequence[SimulatedGpu]) -> None:
    """Writes atomically: a reader sees the old GPUs or the new ones."""
    text = "".join(_line(gpu, f"{path.absolute()}#{index}") for index, gpu in enumerate(gpus))
    _replace(path, text, mode=0o644)


def build_nvml_stub(directory: Path, *, defines: Sequence[str] = ()) -> Path:
    """``defines`` make the library behave like other drivers; see ``nvml_stub.c``."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UgroError("simulated GPUs need a C compiler", hint="install gcc or clang")
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "libnvidia-ml.so.1"
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch) / library.name
        flags = ["-std=c99", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        argv = [compiler, *flags, *(f"-D{define}" for define in defines), "-o", str(built), str(_STUB_SOURCE)]
        _compile(argv)
        os.replace(built, library)  # a running process keeps the file that it loaded
    return library


def write_nvidia_smi(directory: Path, gpus_file: Path) -> Path:
    """A stub ``nvidia-smi`` in ``directory`` that answers from ``gpus_file``."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "nvidia-smi"
    _replace(program, _NVIDIA_SMI.replace("@GPUS@", shlex.quote(str(gpus_file.absolute()))), mode=0o755)
    return program


def _line(gpu: SimulatedGpu, place: str) -> str:
    values = (
        gpu.memory_total_bytes,
        gpu.memory_used_bytes,
        gpu.use_percent,
        gpu.temperature_c,
        None if gpu.power_w is None else round(gpu.power_w * 1000),
        None if gpu.power_limit_w is None else round(gpu.power_limit_w * 1000),
    )
    texts = ["-" if value is None else str(value) for value in values]
    processes = ",".join(f"{pid}:{'-' if memory is None else memory}" for pid, memory in gpu.processes)
    gpu_uuid = gpu.uuid or f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, place)}"
    throttle = "-" if gpu.throttle is None else str(gpu.throttle)
    fields = (gpu_uuid, gpu.name, *texts, str(gpu.error), processes, throttle, _energy(gpu.energy_j))
    if any(mark in field for field in fields for mark in "|\n\r"):
        raise UgroError("the text of a simulated GPU may contain neither | nor line breaks", subject=gpu.name)
    return "|".join(fields) + "\n"


def _energy(joules: float | str | None) -> str:
    if isinstance(joules, str):
        return joules
    return "-" if joules is None else str(round(joules * 1000))


def _replace(path: Path, text: str, *, mode: int) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
    os.replace(name, path)


def _compile(argv: list[str]) -> None:
    hint = f"try: {shlex.join(argv)}"
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UgroError(f"cannot run the C compiler: {error}", hint=hint) from error
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        complaint = errors[0] if errors else f"the compiler exited with {result.returncode}"
        raise UgroError(f"cannot build the NVIDIA stub library: {complaint}", hint=hint)


_NVIDIA_SMI = r"""#!/bin/sh
# A stub of nvidia-smi: two queries in CSV, from a file of simulated GPUs.
gpus=@GPUS@

if [ ! -r "$gpus" ]; then
    echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver." \
         "Make sure that the latest NVIDIA driver is installed and running."
    exit 9
fi

is_known() { case $1 in -|'!'*|'') echo '[N/A]'; return 1 ;; esac; }
plain() { is_known "$1" && echo "$1"; }
mebibytes() { is_known "$1" && echo $(($1 / 1048576)); }
watts() { is_known "$1" && printf '%d.%02d\n' $(($1 / 1000)) $(($1 % 1000 / 10)); }

value() {
    case $1 in
        index) echo "$index" ;;
        pci.bus_id) printf '00000000:%02X:00.0\n' $((index + 1)) ;;
        driver_version) echo pretend ;;
        uuid|gpu_uuid|name|gpu_name|memory.*|utilization.gpu|temperature.gpu|power.*|enforced.power.limit)
            case $error in
                0) readable_value "$1" ;;
                15) echo '[GPU is lost]' ;;
                16) echo '[GPU requires reset]' ;;
                *) echo '[Unknown Error]' ;;
            esac ;;
        *) echo "Field \"$1\" is not a valid field to query."; exit 2 ;;
    esac
}

readable_value() {
    case $1 in
        uuid|gpu_uuid) echo "$uuid" ;;
        name|gpu_name) echo "$name" ;;
        memory.total) mebibytes "$total" ;;
        memory.used) mebibytes "$used" ;;
        utilization.gpu) plain "$use" ;;
        temperature.gpu) plain "$temperature" ;;
        power.draw) watts "$power" ;;
        power.limit|enforced.power.limit) watts "$limit" ;;
        *) echo '[N/A]' ;;
    esac
}

gpu_row() {
    row=
    for field in $(echo "$1" | tr ',' ' '); do
        text=$(value "$field")
        [ $? -ne 2 ] || { echo "$text"; exit 2; }
        row="$row${row:+, }$text"
    done
    echo "$row"
}

app_rows() {
    [ "$error" = 0 ] || return 0
    for app in $(echo "$processes" | tr ',' ' '); do
        pid=${app%%:*}
        bytes=${app#*:}
        process=$(cat "/proc/$pid/comm" 2>/dev/null) || process='[Not Found]'
        case $app in
            *:g) ;;
            *) echo "$uuid, $pid, $process, $(mebibytes "$bytes")" ;;
        esac
    done
}

[ -s "$gpus" ] || { echo 'No devices were found'; exit 6; }
index=0
while IFS='|' read -r uuid name total used use temperature power limit error processes throttle energy; do
    case $1 in
        --query-gpu=*) gpu_row "${1#--query-gpu=}" ;;
        --query-compute-apps=*) app_rows ;;
        *) echo "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help."; exit 2 ;;
    esac
    index=$((index + 1))
done < "$gpus"
"""


# --- files ------------------------------------------------------------------------------------------------------------
# The files of a lab: its record, the cluster file of its agent, and the simulated GPUs of its nodes.


_TITLE = "# Written by `ugro lab up`; `ugro lab down` removes it.\n"
# A node with a small part of a core starts and answers slowly.
_PATIENCE = {"ssh": {"connect_timeout": 15}, "health_check": {"timeout": 10}}


def remembered(lab: Path) -> Shape | None:
    """None without a lab or with an invalid file; such a lab can only be taken down."""
    try:
        return decode(Shape, json.loads(_memory(lab).read_text()))
    except (OSError, json.JSONDecodeError, DecodeError):
        return None


def write(lab: Path, shape: Shape, cluster_file: Path) -> None:
    """The same shape writes the same files, so a running agent has no change to apply."""
    for node in shape.nodes:
        Path(node.home).mkdir(mode=0o700, parents=True, exist_ok=True)
    _files_replace(_memory(lab), dumps(shape) + "\n")
    options = {node.name: _gpu_options(lab, shape, node) for node in shape.nodes}
    _files_replace(cluster_file, cluster_text(shape, options))


def cluster_text(shape: Shape, options: dict[str, list[str]]) -> str:
    import yaml

    nodes = {node.name: _entry(node, options.get(node.name, [])) for node in shape.nodes}
    nodes[shape.nodes[0].name]["role"] = "master"
    document = {"cluster": {"name": "lab"}, **_PATIENCE, "nodes": nodes}
    return _TITLE + str(yaml.safe_dump(document, sort_keys=False, width=1000))


def _entry(node: LabNode, options: list[str]) -> dict[str, Any]:
    slow = ["--cgroup", node.cgroup] if node.cgroup else ["--speed", f"{node.speed:g}"]
    entry: dict[str, Any] = {
        "labels": ["lab"],
        "transport": [sys.executable, "-m", "ugro.lab.enter", "--home", node.home, *slow, *options],
        "remote_root": f"{node.home}/grid_workspace",
    }
    # Jobs get the packages of UGRO's environment. The first stage reads a list of Pythons in ASCII, separated by ":".
    if sys.executable.isascii() and ":" not in sys.executable:
        entry["python"] = sys.executable
    return entry


def _gpu_options(lab: Path, shape: Shape, node: LabNode) -> list[str]:
    """Options for ``ugro.lab.enter`` that show a node its simulated GPUs, of a different model on each node."""
    if not shape.gpus:
        return []
    gpus = Path(node.home) / "gpus"
    if not gpus.exists():  # a user may have changed them
        models = list(SIMULATED_MODELS.values())
        write_gpus(gpus, [models[shape.nodes.index(node) % len(models)]] * shape.gpus)
    library = _nvml_stub(lab)
    if library is not None:
        return ["--env", f"UGRO_NVML_LIBRARY={library}", "--env", f"UGRO_PRETEND_GPUS={gpus}"]
    tools = write_nvidia_smi(Path(node.home) / "bin", gpus).parent
    return ["--path", str(tools), "--env", f"UGRO_NVML_LIBRARY={lab / 'no-library'}"]


def _nvml_stub(lab: Path) -> Path | None:
    """None without a compiler; then a stub ``nvidia-smi`` is used."""
    library = lab / "nvml" / "libnvidia-ml.so.1"
    if library.exists():
        return library
    try:
        return build_nvml_stub(library.parent)
    except UgroError:
        return None


def _memory(lab: Path) -> Path:
    return lab / "lab.json"


def _files_replace(path: Path, text: str) -> None:
    """Writes atomically, and only if the text differs."""
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
