"""``ugro node bench`` on real nodes: figures that are kept and used, and nothing left behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.integration.sharing import commands
from tests.rig.agent import holder
from tests.rig.waiting import is_alive, processes_with, wait_until

MEASURING = b"ugro.features.hardware.node.bench"
CPU_FIGURES = ("one_core_bytes_per_s", "all_cores_bytes_per_s")
DISK_FIGURES = ("write_bytes_per_s", "read_bytes_per_s", "random_reads_per_s", "fsync_s")
GPU_FIGURES = ("fp16_tflops", "memory_bytes_per_s", "to_device_bytes_per_s", "from_device_bytes_per_s")
CLUSTER = "nodes:\n  here: {transport: local, remote_root: %s/root}\n"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ugro]:
    """One node, this machine, for tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "cluster.yaml").write_text(CLUSTER % folder)
    with commands(folder / "cluster.yaml") as ugro:
        yield ugro


@pytest.fixture
def own(ugro: Ugro) -> Ugro:
    """The same, for one test."""
    ugro.cluster = ugro.home / "cluster.yaml"
    ugro.cluster.write_text(CLUSTER % ugro.home)
    return ugro


def document(answer: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def measuring(ugro: Ugro) -> list[int]:
    own = set(ugro.processes())
    return [pid for pid in processes_with(MEASURING) if pid in own]


def begin(ugro: Ugro, *words: str) -> subprocess.Popen[bytes]:
    """A full measurement, of which a process has started on the node."""
    running = ugro.start("node", "bench", "--force", *words)
    wait_until(lambda: measuring(ugro), 30, "a process that measures")
    return running


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "bench" in path.name]


def test_figures_are_printed_kept_and_exposed(here: Ugro) -> None:
    measured = document(here("node", "bench", "--quick", "--only", "cpu", "--force", "--json"))["measurement"]
    [node] = measured["nodes"]
    assert node["node"] == "here"
    assert node["cpu"]["one_core_bytes_per_s"] > 0
    assert (measured["mode"], measured["links"], node["storage"]) == ("quick", [], None)
    shown = document(here("node", "show", "here", "--json"))
    assert shown["hardware"]["figures"]["cpu"] == node["cpu"]
    assert "CPU compresses" in here("node", "show", "here").stdout
    assert 'ugro_node_measured_cpu_bytes_per_second{node="here"}' in here("metrics").stdout


def test_a_node_with_a_job_is_not_measured_unless_forced(here: Ugro) -> None:
    job = document(here("run", "--detach", "--json", "--", "sleep", "600"))["job"]["id"]
    wait_until(lambda: "running" in here("status", str(job)).stdout, 20, "the job to run")
    refused = here("node", "bench", "--quick", "--only", "cpu")
    assert refused.returncode == 6
    assert "here runs a job" in refused.stderr
    assert "--force" in refused.stderr
    here("cancel", str(job))
    here("wait", str(job))  # an agent that is stopped before leaves the job on its node


def test_mistakes_are_one_line_and_a_hint(here: Ugro) -> None:
    assert here("node", "bench", "--only", "gpu").returncode == 2
    alone = here("node", "bench", "--only", "network")
    assert alone.returncode == 2
    assert "need two nodes" in alone.stderr
    unknown = here("node", "bench", "hree")
    assert unknown.returncode == 4
    assert "here" in unknown.stderr
    assert "Traceback" not in unknown.stderr


@pytest.mark.proof
def test_every_part_of_a_node_is_measured_or_said_not_to_be(own: Ugro) -> None:
    [node] = document(own("node", "bench", "--quick", "--force", "--json"))["measurement"]["nodes"]
    skipped = " ".join(one["what"] for one in node["skipped"])
    for part in ("cpu", "memory_bytes_per_s", "storage"):
        assert node[part], part
    assert node["memory_bytes_per_s"] > 0
    for part, figures in (("cpu", CPU_FIGURES), ("storage", DISK_FIGURES)):
        assert [name for name in figures if not node[part][name] > 0] == []
    assert node["devices"] or "devices" in skipped
    assert not files_below(own.home / "root")


@pytest.mark.proof
def test_devices_are_measured_where_pytorch_is(own: Ugro) -> None:
    torch = pytest.importorskip("torch")
    assert own.cluster is not None
    own.cluster.write_text((CLUSTER % own.home).replace("}", f", python: {sys.executable}}}"))
    measured = document(own("node", "bench", "--only", "devices", "--force", "--json", timeout=180))["measurement"]
    [node] = measured["nodes"]
    assert node["torch"] == torch.__version__
    assert len(node["devices"]) == max(1, torch.cuda.device_count())
    for device in node["devices"]:
        assert device["fp32_tflops"] > 0
    if torch.cuda.is_available():
        for device in node["devices"]:
            assert [name for name in GPU_FIGURES if not device[name] > 0] == []


@pytest.mark.proof
def test_no_job_starts_on_a_node_that_is_measured_and_it_starts_afterwards(own: Ugro) -> None:
    running = begin(own, "--only", "cpu")
    job = document(own("run", "--detach", "--json", "--", "true"))["job"]["id"]
    wait_until(lambda: "is being measured" in own("why", str(job)).stdout, 20, "the reason why it waits")
    assert measuring(own), "it is still measured"
    running.communicate(timeout=120)
    wait_until(lambda: "succeeded" in own("status", str(job)).stdout, 20, "the job to run")


@pytest.mark.proof
def test_two_measurements_of_one_node_do_not_run_at_once(own: Ugro) -> None:
    running = begin(own, "--only", "cpu")
    refused = own("node", "bench", "--only", "cpu", "--force")
    assert refused.returncode == 6
    assert "is being measured" in refused.stderr
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)


@pytest.mark.proof
@pytest.mark.parametrize("part", ["storage", "cpu"])
def test_ctrl_c_ends_everything_on_the_node(own: Ugro, part: str) -> None:
    running = begin(own, "--only", part)
    pids = measuring(own)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130, err
    assert b"nothing was recorded" in err
    wait_until(lambda: not any(map(is_alive, pids)), 15, f"{pids} to end")
    assert not files_below(own.home / "root")
    assert document(own("node", "show", "here", "--json"))["hardware"]["figures"] is None


@pytest.mark.proof
def test_an_agent_that_is_killed_leaves_no_process_no_file_and_no_hold(own: Ugro) -> None:
    running = begin(own, "--only", "storage")
    pids = measuring(own)
    agent = holder(own.home)
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    running.communicate(timeout=30)
    assert running.returncode != 0
    wait_until(lambda: not any(map(is_alive, pids)), 40, f"{pids} to end with their agent")
    assert not files_below(own.home / "root")
    done = own("run", "--", "true")
    assert done.returncode == 0, done.stderr


@pytest.mark.proof
def test_links_and_all_reduces_between_two_machines_reached_by_ssh(ugro: Ugro, farm_of: Farms) -> None:
    farm = farm_of(2)
    names = [node.name for node in farm.nodes]
    ugro.cluster = farm.cluster_yaml(nodes={name: {"python": sys.executable} for name in names})
    words = ("--quick", "--only", "network", "--only", "allreduce", "--force", "--json")
    measured = document(ugro("node", "bench", *words))["measurement"]
    [link] = measured["links"]
    assert {link["source"], link["target"]} == set(names)
    for figure in ("bytes_per_s", "back_bytes_per_s", "latency_s", "jitter_s"):
        assert link[figure] > 0, (figure, link)
    sizes = [one["size_bytes"] for one in measured["allreduces"]]
    assert 10**6 in sizes, measured
    assert len(sizes) == 3 or "there was no time left" in str(measured["skipped"])
    assert {(one["ranks"], one["backend"]) for one in measured["allreduces"]} == {(2, "gloo")}
    shown = document(ugro("node", "show", names[0], "--json"))["hardware"]["links"]
    assert [one["target"] for one in shown] == [names[1]]
    # With the time of a full measurement none is left out, on a slow machine either.
    measured = document(ugro("node", "bench", "--only", "allreduce", "--force", "--json", timeout=180))["measurement"]
    took = {one["size_bytes"]: one["seconds"] for one in measured["allreduces"]}
    assert list(took) == [10**6, 16 * 10**6, 128 * 10**6], measured
    assert 0 < took[10**6] < took[128 * 10**6]


@pytest.mark.proof
def test_a_node_whose_link_breaks_is_left_out_and_the_others_are_measured(ugro: Ugro, farm_of: Farms) -> None:
    farm = farm_of(2)
    ugro.cluster = farm.cluster_yaml()
    running = ugro.start("node", "bench", "--force", "--only", "storage", "--json")
    lost = farm.nodes[0]
    wait_until(lambda: [pid for pid in processes_with(MEASURING) if pid in lost.processes()], 30, "it to be measured")
    lost.power_off()
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    nodes = {node["node"]: node for node in json.loads(out)["measurement"]["nodes"]}
    assert nodes[farm.nodes[1].name]["storage"]
    assert "could not be reached" in nodes[lost.name]["skipped"][-1]["why"]
