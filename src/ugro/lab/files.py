"""The files of a lab: its record, the cluster file of its agent, and the simulated GPUs of its nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ugro.core.errors import UgroError
from ugro.core.support.codec import DecodeError, decode, dumps
from ugro.lab.shape import LabNode, Shape
from ugro.lab.simulated_gpus import SIMULATED_MODELS, build_nvml_stub, write_gpus, write_nvidia_smi

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
    _replace(_memory(lab), dumps(shape) + "\n")
    options = {node.name: _gpu_options(lab, shape, node) for node in shape.nodes}
    _replace(cluster_file, cluster_text(shape, options))


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


def _replace(path: Path, text: str) -> None:
    """Writes atomically, and only if the text differs."""
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
