"""The energy of a run's devices is measured on the node, and a driver that hangs keeps no run from ending."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rig.ledger import Ledger
from tests.rig.nodeprogram import LocalNode
from tests.rig.waiting import is_alive, wait_until
from ugro.features.training.on_node import ENERGY
from ugro.kernel.links.link import Link
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

GPU = "GPU-11111111-aaaa"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: a C compiler")

# Every GPU is there, and whoever asks for its UUID waits for ever.
_HANGS = """\
#include <unistd.h>
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { text[0] = '1'; text[1] = 0; return length < 2; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &index; for (;;) pause(); return 0; }
"""


def with_gpus(node: LocalNode, library: Path, *gpus: SimulatedGpu) -> None:
    write_gpus(node.root / "gpus", gpus)
    variables = {"UGRO_NVML_LIBRARY": str(library), "UGRO_PRETEND_GPUS": str(node.root / "gpus")}
    node.spec = replace(node.spec, env=(*node.spec.env, *variables.items()))


def start(node: LocalNode, link: Link, ledger: Ledger) -> dict[str, Any]:
    spec = {"ranks": [ledger.rank(0, "sleep")], "grace_s": 1, "gpus": [[0, GPU]], "user": "ann"}
    run: dict[str, Any] = node.call(link, "start", job="train", attempt=1, spec=spec)["run"]
    return run


def samples(node: LocalNode) -> list[dict[str, Any]]:
    path = node.run_dir("train", 1) / ENERGY
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def meters(node: LocalNode) -> list[int]:
    """The children of its supervisor that are no ranks."""
    run = json.loads((node.run_dir("train", 1) / "state.json").read_bytes())
    ranks = {rank["pid"] for rank in run["ranks"]}
    found = Path(f"/proc/{run['pid']}/task/{run['pid']}/children").read_text().split()
    return [int(pid) for pid in found if int(pid) not in ranks]


def test_a_counter_is_read_at_the_start_and_at_the_end(node: LocalNode, ledger: Ledger, tmp_path: Path) -> None:
    with_gpus(node, build_nvml_stub(tmp_path), SimulatedGpu(uuid=GPU, power_w=120.0), SimulatedGpu(power_w=900.0))
    link = node.link()
    status = start(node, link, ledger)
    assert status["state"]["is_metered"] is True
    wait_until(lambda: (node.run_dir("train", 1) / ENERGY).exists(), 20, "the meter")
    [meter] = meters(node)
    # The counter and the clock are read one after the other: what lies between them must be small beside the run.
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 2, 20, "a run of two seconds")
    exit_record = node.call(link, "stop", job="train", attempt=1)["run"]["exit"]
    assert exit_record["leftovers"] == 0, "the meter is none of the run's processes"
    assert not is_alive(meter)
    last = samples(node)[-1]
    joules, measured_s, source = last["devices"]["gpu0"]
    assert source == "counter"
    assert joules / measured_s == pytest.approx(120.0, rel=0.2)
    assert 0 < measured_s <= last["s"]


@pytest.mark.proof
def test_without_a_counter_power_is_added_up(node: LocalNode, ledger: Ledger, tmp_path: Path) -> None:
    with_gpus(node, build_nvml_stub(tmp_path, defines=("UGRO_OLD_DRIVER",)), SimulatedGpu(uuid=GPU, power_w=80.0))
    link = node.link()
    start(node, link, ledger)
    wait_until(lambda: any("gpu0" in one["devices"] for one in samples(node)), 20, "a sample")
    node.call(link, "stop", job="train", attempt=1)
    joules, measured_s, source = samples(node)[-1]["devices"]["gpu0"]
    assert source == "power"
    assert joules / measured_s == pytest.approx(80.0, rel=0.01)


@pytest.mark.proof
def test_a_gpu_whose_power_cannot_be_read_is_not_claimed(node: LocalNode, ledger: Ledger, tmp_path: Path) -> None:
    with_gpus(node, build_nvml_stub(tmp_path), SimulatedGpu(uuid=GPU, power_w=None, energy_j=None))
    link = node.link()
    start(node, link, ledger)
    node.call(link, "stop", job="train", attempt=1)
    assert [one["devices"] for one in samples(node)] in ([{}], []), "nothing was measured"


@pytest.mark.proof
def test_a_driver_that_hangs_keeps_no_run_from_ending(node: LocalNode, ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "hangs.c").write_text(_HANGS)
    library = tmp_path / "hangs.so"
    argv = ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "hangs.c")]
    subprocess.run(argv, check=True, timeout=60)
    with_gpus(node, library, SimulatedGpu(uuid=GPU))
    link = node.link()
    start(node, link, ledger)
    [meter] = meters(node)
    assert node.call(link, "stop", timeout_s=30, job="train", attempt=1)["run"]["exit"]["outcome"] == "stopped"
    wait_until(lambda: not is_alive(meter), 20, "the meter to be gone")


@pytest.mark.proof
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_tool_that_hangs_is_gone_with_its_run(node: LocalNode, ledger: Ledger, tmp_path: Path, how: str) -> None:
    tool, pids = tmp_path / "bin" / "nvidia-smi", tmp_path / "pids"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ntrap '' TERM INT HUP\necho $$ >> {pids}\nwhile :; do sleep 1; done\n")
    tool.chmod(0o755)
    variables = {"UGRO_NVML_LIBRARY": str(tmp_path / "nowhere.so"), "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    node.spec = replace(node.spec, env=(*node.spec.env, *variables.items()))
    link = node.link()
    start(node, link, ledger)
    wait_until(lambda: pids.exists() and pids.read_text().strip(), 20, "the tool to hang")
    if how == "kill":
        os.kill(json.loads((node.run_dir("train", 1) / "state.json").read_bytes())["pid"], signal.SIGKILL)
    node.call(link, "stop", timeout_s=30, job="train", attempt=1)
    wait_until(lambda: not any(map(is_alive, map(int, pids.read_text().split()))), 20, "the tool to be gone")


@pytest.mark.proof
def test_a_meter_ends_with_its_supervisor_and_what_it_had_found_is_there(
    node: LocalNode, ledger: Ledger, tmp_path: Path
) -> None:
    with_gpus(node, build_nvml_stub(tmp_path), SimulatedGpu(uuid=GPU, power_w=120.0))
    link = node.link()
    start(node, link, ledger)
    wait_until(lambda: any("gpu0" in one["devices"] for one in samples(node)), 20, "a sample")
    [meter] = meters(node)
    os.kill(json.loads((node.run_dir("train", 1) / "state.json").read_bytes())["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(meter), 20, "the meter to be gone")
    node.call(link, "stop", job="train", attempt=1)
    assert samples(node)[-1]["devices"]["gpu0"][0] > 0


@pytest.mark.proof
def test_the_cpu_is_counted_where_its_counter_may_be_read(node: LocalNode, ledger: Ledger, tmp_path: Path) -> None:
    package = tmp_path / "powercap" / "intel-rapl:0"
    package.mkdir(parents=True)
    for name, text in (("name", "package-0"), ("energy_uj", "90000000"), ("max_energy_range_uj", "100000000")):
        (package / name).write_text(text)
    node.spec = replace(node.spec, env=(*node.spec.env, ("UGRO_POWERCAP", str(package.parent))))
    link = node.link()
    spec = {"ranks": [ledger.rank(0, "sleep")], "grace_s": 1}
    assert node.call(link, "start", job="train", attempt=1, spec=spec)["run"]["state"]["is_metered"] is True
    wait_until(lambda: samples(node), 20, "a sample")
    (package / "energy_uj").write_text("20000000")  # it has wrapped
    node.call(link, "stop", job="train", attempt=1)
    joules, measured_s, source = samples(node)[-1]["devices"]["cpu"]
    assert (joules, source) == (30.0, "counter")
    assert measured_s > 0


def test_a_run_without_gpus_has_no_meter(node: LocalNode, ledger: Ledger) -> None:
    node.spec = replace(node.spec, env=(*node.spec.env, ("UGRO_POWERCAP", "/nowhere")))
    link = node.link()
    spec = {"ranks": [ledger.rank(0, "sleep")], "grace_s": 1}
    status = node.call(link, "start", job="train", attempt=1, spec=spec)["run"]
    assert "is_metered" not in status["state"]
    node.call(link, "stop", job="train", attempt=1)
    assert not (node.run_dir("train", 1) / ENERGY).exists()
