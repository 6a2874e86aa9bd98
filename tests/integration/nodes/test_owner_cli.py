"""Somebody else's process on a simulated GPU: what the commands and the dashboard say, and what jobs do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.rig.waiting import name_of, processes_with, wait_until
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(shutil.which("cc") is None, reason="not installed: a C compiler"),
]
CLUSTER = """
nodes:
  n1:
    transport: local
    remote_root: {folder}/n1
    env: {{UGRO_NVML_LIBRARY: {library}, UGRO_PRETEND_GPUS: {folder}/gpus}}
    owner: {{when: gpu_busy, then: pause, quiet: 3s}}
"""


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "cluster.yaml"
        self.file.write_text(CLUSTER.format(folder=folder, library=build_nvml_stub(folder)))
        self.used_by()

    def used_by(self, *pids: int) -> None:
        """These processes are on its GPU."""
        write_gpus(self.folder / "gpus", [SimulatedGpu(processes=tuple((pid, 5) for pid in pids))])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def ugro(machine: Machine) -> Iterator[Ugro]:
    with commands(machine.file) as ugro:
        yield ugro
        ugro("cancel", "--all")
        for job in json.loads(ugro("status", "--json").stdout)["jobs"]:
            ugro("wait", str(job["id"]))


@pytest.fixture
def game() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def owner(ugro: Ugro) -> dict[str, Any]:
    [node] = json.loads(ugro("node", "ls", "--json").stdout)["nodes"]
    found: dict[str, Any] = node["owner"]
    return found


def state(ugro: Ugro, job: int) -> str:
    return str(json.loads(ugro("status", str(job), "--json").stdout)["job"]["state"])


def test_somebodys_process_on_a_gpu_is_noticed_said_and_waited_for(
    ugro: Ugro, machine: Machine, game: subprocess.Popen[bytes]
) -> None:
    wait_until(lambda: owner(ugro)["is_known"], 30, "the first word of the node")
    job = json.loads(ugro("run", "--detach", "--json", "--", "sleep", "600").stdout)["job"]["id"]
    wait_until(lambda: state(ugro, job) == "running", 30, "the job to run")
    own = processes_with(os.fsencode(f"UGRO_RUN_DIR={machine.folder}/"))
    machine.used_by(*(pid for pid in own if name_of(pid) == "sleep"))
    wait_until(lambda: f"job {job}" in ugro("node", "show", "n1").stdout, 30, "its own process to be known")
    assert not owner(ugro)["is_there"]
    machine.used_by(game.pid)
    wait_until(lambda: state(ugro, job) == "recovering", 30, "the job to make way")
    sign = f"sleep (pid {game.pid}) uses GPU 0"
    words = f"used by its owner ({sign}): no new jobs until it was quiet for 3.00 s"
    assert f"n1 is {words}" in " ".join(ugro("why", str(job)).stdout.split())
    assert words in ugro("health").stdout
    assert words in ugro("node", "ls").stdout
    assert "gpu_busy, then pause, quiet after 3.00 s" in ugro("node", "show", "n1").stdout
    assert f"noticed by GPU processes; {words}" in ugro("doctor").stdout
    assert f"it made way for the owner of n1 ({sign})" in ugro("status", str(job)).stdout
    assert ugro("node", "resume", "n1").returncode == 0
    assert owner(ugro)["is_there"], "an owner is not sent away"
    machine.used_by()
    wait_until(lambda: state(ugro, job) == "running", 30, "the job to be started again")
    assert json.loads(ugro("status", str(job), "--json").stdout)["job"]["attempt"] == 2
    assert f"it is {words}" in ugro("events").stdout
    assert re.search(r'^ugro_node_owner_present\{node="n1"\} [01]', ugro("metrics").stdout, re.MULTILINE)


def test_a_machine_that_its_owner_uses_is_not_measured(
    ugro: Ugro, machine: Machine, game: subprocess.Popen[bytes]
) -> None:
    machine.used_by(game.pid)
    wait_until(lambda: owner(ugro)["is_there"], 30, "the owner to be noticed")
    refused = ugro("node", "bench", "--quick", "--only", "memory")
    assert refused.returncode == 6, refused.stderr
    assert "n1 is used by its owner" in refused.stderr
    assert ugro("node", "bench", "--quick", "--only", "memory", "--force").returncode == 0


def test_a_measurement_ends_when_somebody_comes(ugro: Ugro, machine: Machine, game: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: owner(ugro)["is_known"], 30, "the first word of the node")
    bench = ugro.start("node", "bench", "--force", "--json", "--only", "cpu", "--only", "memory")
    own = b"ugro.features.hardware.node.bench"
    wait_until(lambda: set(processes_with(own)) & set(ugro.processes()), 30, "a process that measures")
    machine.used_by(game.pid)
    said, complaint = bench.communicate(timeout=60)
    assert bench.returncode == 0, complaint
    [node] = json.loads(said)["measurement"]["nodes"]
    assert (node["cpu"], node["is_forced"]) == (None, True)
    assert [one["what"] for one in node["skipped"]] == ["cpu", "memory"]
    assert node["skipped"][0]["why"].startswith(f"its owner came (sleep (pid {game.pid}) uses GPU 0")
    assert not set(processes_with(own)) & set(ugro.processes())
