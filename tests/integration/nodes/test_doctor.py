"""``ugro doctor`` on real sshds, through the command line."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Completed, Farms, Ugro
from tests.integration.nodes.test_check import listening
from tests.rig.ports import free_port
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import name_of, processes_with_variable, wait_until
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.support.codec import decode
from ugro.lab.nodes import GPU_IS_LOST, SimulatedGpu, write_gpus, write_nvidia_smi

_SOON_S = 5


def findings(completed: Completed) -> list[Finding]:
    assert completed.stdout, completed.stderr
    return [decode(Finding, finding) for finding in json.loads(completed.stdout)["findings"]]


def about(found: list[Finding], subject: str, check: str) -> list[Finding]:
    return [finding for finding in found if (finding.subject, finding.check) == (subject, check)]


def only(found: list[Finding], subject: str, check: str) -> Finding:
    [finding] = about(found, subject, check)
    return finding


def settings(**ssh: Any) -> dict[str, Any]:
    """Ports that nobody else on this machine uses, and the limits that a test asks for."""
    return {
        "ssh": ssh,
        "cluster": {"master_port": free_port()},
        "ray": {"redis_port": free_port(), "dashboard_port": free_port()},
    }


def write_cluster(farm: SshdFarm, *, nodes: dict[str, Any] | None = None, **extra: Any) -> Path:
    ssh = {"config_file": str(farm.ssh_config), **extra.pop("ssh", {})}
    return farm.cluster_yaml(ssh=ssh, nodes=nodes or {}, **extra)


@pytest.mark.proof
def test_nodes_that_are_well_get_good_lines_only(cluster: SshdFarm, ugro: Ugro) -> None:
    write_cluster(cluster, **settings())
    completed = ugro("doctor", "--json")
    found = findings(completed)
    assert completed.returncode == 0
    assert {finding.grade for finding in found} == {Grade.OK}, found
    for node in cluster.nodes:
        checks = [finding.check for finding in found if finding.subject == node.name]
        assert checks == ["reach", "host key", "python", "root", "clock", "ports", "gpu", "limits", "logout"]
    assert "all 6 pairs reach each other" in only(found, "cluster", "network").text
    assert list((cluster.nodes[0].home / "grid_workspace").glob(".ugro-check*")) == []


def test_sick_nodes_are_told_apart_and_delay_nobody(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of(4)
    well, frozen, bare, blocked = farm.nodes
    frozen.freeze()
    bare.configure(python=False)
    (blocked.home / "grid_workspace").write_text("a file where the folder should be")
    with listening() as taken:
        changes = settings(connect_timeout=2)
        changes["cluster"]["master_port"] = taken
        ugro.cluster = write_cluster(farm, **changes)
        completed = ugro("doctor", "--json")
    found = findings(completed)
    assert completed.returncode == 5
    assert only(found, well.name, "reach").grade is Grade.OK
    assert only(found, frozen.name, "reach").text == "connecting timed out"
    assert only(found, bare.name, "reach").text == "python3 not found"
    assert "grid_workspace" in only(found, blocked.name, "reach").text
    failed = [only(found, node.name, "reach") for node in (frozen, bare, blocked)]
    assert {finding.grade for finding in failed} == {Grade.FAILED}
    assert all(finding.remedy for finding in failed)
    # A node that cannot be reached is told by one line, and last by the one that takes longest.
    subjects = [finding.subject for finding in found]
    assert [subjects.count(node.name) for node in (frozen, bare, blocked)] == [1, 1, 1]
    assert subjects.index(frozen.name) > max(index for index, name in enumerate(subjects) if name == well.name)
    port = only(found, well.name, "ports")
    assert port.grade is Grade.WARNING
    assert f"cluster.master_port {taken} is taken by {name_of(os.getpid())} (pid {os.getpid()}," in port.text
    frozen.thaw()


@pytest.mark.proof
def test_a_root_that_stopped_being_writable_is_a_failure(cluster: SshdFarm, ugro: Ugro) -> None:
    write_cluster(cluster, **settings())
    node = cluster["n002"]
    root = node.home / "grid_workspace"
    root.mkdir()
    node.configure(home_mode=0o555)  # so that its sessions have no more rights than their user
    assert ugro("health").returncode == 0
    root.chmod(0o555)
    completed = ugro("doctor", "--json")
    root.chmod(0o755)
    found = findings(completed)
    assert completed.returncode == 1
    finding = only(found, "n002", "root")
    assert (finding.grade, finding.text) == (Grade.FAILED, f"{root} cannot be written: Permission denied")
    assert "sudo chown " in (finding.remedy or "")
    assert only(found, "n001", "root").grade is Grade.OK


@pytest.mark.proof
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root may mount")
def test_a_full_disk_and_a_read_only_one_are_failures(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of(1)
    ugro.cluster = write_cluster(farm, **settings())
    root = farm.nodes[0].home / "grid_workspace"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(root)], check=True)
    try:
        small = only(findings(ugro("doctor", "--json")), "n001", "root")
        assert (small.grade, small.text.endswith(" left")) == (Grade.FAILED, True)
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        read_only = only(findings(ugro("doctor", "--json")), "n001", "root")
        assert read_only.grade is Grade.FAILED
        assert read_only.text == f"{root} cannot be written: Read-only file system"
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


@pytest.mark.proof
def test_host_keys_that_ssh_does_not_check_are_a_warning_and_no_failure(cluster: SshdFarm, ugro: Ugro) -> None:
    write_cluster(cluster, **settings())
    with cluster.ssh_config.open("a") as config:
        config.write("Host n002\n  StrictHostKeyChecking no\n")
    completed = ugro("doctor", "--json", "n001", "n002")
    found = findings(completed)
    assert completed.returncode == 0
    assert only(found, "n001", "host key").grade is Grade.OK
    assert only(found, "n002", "host key").grade is Grade.WARNING
    assert "n003" not in completed.stdout


def install_torch(node: SshdNode, version: str, cuda: str) -> None:
    """Where the node's own Python finds it, and such that importing it would be noticed."""
    packages = user_site(node)
    metadata = packages / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    build = f"{version}+cu{cuda.replace('.', '')}"
    (packages / "torch" / "version.py").write_text(f"__version__ = '{build}'\ncuda: Optional[str] = '{cuda}'\n")


def user_site(node: SshdNode) -> Path:
    argv = ["/usr/bin/env", "-i", f"HOME={node.home}", f"PATH={node.options.path}", "python3", "-m", "site"]
    asked = subprocess.run([*argv, "--user-site"], capture_output=True, text=True, timeout=20, check=False)
    packages = Path(asked.stdout.strip())
    packages.mkdir(parents=True, exist_ok=True)
    return packages


@pytest.mark.proof
def test_versions_that_differ_are_found_without_importing_torch(cluster: SshdFarm, ugro: Ugro) -> None:
    write_cluster(cluster, **settings())
    install_torch(cluster["n001"], "2.9.0", "12.8")
    install_torch(cluster["n002"], "2.8.0", "12.8")
    completed = ugro("doctor", "--json")
    found = findings(completed)
    assert completed.returncode == 0
    assert only(found, "n001", "packages").text == "torch 2.9.0+cu128, CUDA 12.8"
    told = [(finding.grade, finding.text) for finding in about(found, "cluster", "versions")]
    assert told[:2] == [
        (Grade.WARNING, "torch is not installed on n003; others have 2.9.0"),
        (Grade.WARNING, "torch differs: n001 has 2.9.0 (+cu128), n002 2.8.0 (+cu128)"),
    ]
    assert told[2][0] is Grade.OK
    assert "CUDA 12.8" in told[2][1]


def make_python_hang(node: SshdNode) -> None:
    # The node program's own Python reads no such file.
    (user_site(node) / "usercustomize.py").write_text("import time; time.sleep(1000)")


@pytest.mark.proof
def test_a_python_that_hangs_costs_its_own_check_only(cluster: SshdFarm, ugro: Ugro) -> None:
    write_cluster(cluster, **settings(timeout=6))
    make_python_hang(cluster["n002"])
    completed = ugro("doctor", "--json")
    found = findings(completed)
    assert completed.returncode == 0
    hung = only(found, "n002", "packages")
    assert (hung.grade, hung.text) == (Grade.WARNING, "could not be checked: it did not end within 5.4 s")
    assert {finding.grade for finding in found if finding != hung} == {Grade.OK}
    assert "all 6 pairs" in only(found, "cluster", "network").text
    wait_until(lambda: not hanging(cluster["n002"]), _SOON_S, "the Python that hung to be ended")


def hanging(node: SshdNode) -> list[int]:
    found = []
    for pid in processes_with_variable("HOME", [str(node.home)]):
        with suppress(OSError):
            if b"importlib" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.proof
def test_nothing_goes_on_for_a_user_who_left(cluster: SshdFarm, ugro: Ugro) -> None:
    write_cluster(cluster, **settings(timeout=60))
    make_python_hang(cluster["n001"])
    with ugro.start("doctor") as command:
        wait_until(lambda: hanging(cluster["n001"]), 20, "the check to run")
        command.kill()
    wait_until(lambda: not hanging(cluster["n001"]), _SOON_S, "the check to be ended")
    assert ugro("health").returncode == 0


@pytest.mark.proof
def test_nodes_that_cannot_reach_each_other_are_failures_pair_by_pair(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of.with_cables(2)
    for node in farm.nodes:
        node.cable.isolate()
    ssh = {"config_file": str(farm.ssh_config)}
    ugro.cluster = farm.cluster_yaml(ssh=ssh)
    completed = ugro("doctor", "--json")
    found = findings(completed)
    assert completed.returncode == 1
    for one, other in ((farm.nodes[0], farm.nodes[1]), (farm.nodes[1], farm.nodes[0])):
        finding = only(found, f"{one.name} → {other.name}", "network")
        assert finding.grade is Grade.FAILED
        assert f"{other.host}: " in finding.text
        assert finding.remedy == f"if a firewall blocks {one.name} on {other.name}: sudo ufw allow from {one.host}"
    assert about(found, "cluster", "network") == []


@pytest.mark.proof
def test_a_gpu_that_is_lost_is_a_failure(farm_of: Farms, ugro: Ugro, tmp_path: Path) -> None:
    farm = farm_of(1)
    gpus = tmp_path / "gpus"
    write_gpus(gpus, [SimulatedGpu(), SimulatedGpu(error=GPU_IS_LOST)])
    tools = write_nvidia_smi(tmp_path / "bin", gpus).parent
    env = {"PATH": f"{tools}:{farm.nodes[0].options.path}", "UGRO_NVML_LIBRARY": str(tmp_path / "none.so")}
    ugro.cluster = write_cluster(farm, nodes={"n001": {"env": env}}, **settings())
    completed = ugro("doctor", "--json")
    finding = only(findings(completed), "n001", "gpu")
    assert completed.returncode == 1
    assert finding.grade is Grade.FAILED
    assert "GPU 1" in finding.text


@pytest.mark.proof
def test_without_a_terminal_there_is_a_line_of_tabs_for_each_finding(cluster: SshdFarm, ugro: Ugro) -> None:
    write_cluster(cluster, **settings())
    completed = ugro("doctor", "n001")
    header, *lines = completed.stdout.splitlines()
    assert header.split("\t") == ["grade", "subject", "check", "text", "remedy"]
    assert lines[0].split("\t")[:3] == ["ok", "n001", "reach"]
    assert {len(line.split("\t")) for line in lines} == {5}
    assert " ok   checked in " in completed.stderr


@pytest.mark.proof
def test_on_a_terminal_each_finding_is_a_line_with_its_remedy_below(farm_of: Farms, ugro: Ugro) -> None:
    farm = farm_of(1)
    with listening() as taken:
        changes = settings()
        changes["ray"]["redis_port"] = taken
        ugro.cluster = write_cluster(farm, **changes)
        lines = on_a_terminal(ugro, "doctor")
    shown = [line for line in lines if line.startswith(("✓", "!", "✗"))]
    assert shown[0].startswith("✓ n001     reach     connected by ssh")
    start = f"! n001     ports     ray.redis_port {taken}"
    [remedy] = [below for line, below in itertools.pairwise(lines) if line.startswith(start)]
    assert remedy.strip().startswith("→ end it: ugro exec n001 -- kill")


def on_a_terminal(ugro: Ugro, *args: str) -> list[str]:
    ours, theirs = os.openpty()
    env = ugro.environment({"NO_COLOR": "1", "TERM": "xterm"})
    with subprocess.Popen(ugro.argv(*args), env=env, cwd=ugro.home / "cwd", stdin=theirs, stdout=theirs) as command:
        os.close(theirs)
        text = b""
        with suppress(OSError):  # how a terminal says that nobody is left on the other side
            while part := os.read(ours, 65536):
                text += part
        assert command.wait(30) == 0
    os.close(ours)
    return text.decode().replace("\r\n", "\n").split("\n")


@pytest.mark.proof
def test_a_node_that_nobody_knows_is_not_found(cluster: SshdFarm, ugro: Ugro) -> None:
    completed = ugro("doctor", "n0001")
    assert completed.returncode == 4
    assert "did you mean n001?" in completed.stderr
