"""Unequal nodes on this machine, through the real command line: made, measured, changed, taken away whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import InProcess, Ugro
from tests.rig.pace import measure
from tests.rig.waiting import is_alive, wait_until
from ugro.client.client import Client
from ugro.kernel.support.state_dir import StateDir
from ugro.lab import lab as cgroups
from ugro.lab import throttle as processes
from ugro.lab.enter import MARK
from ugro.lab.lab import Lab

BURN = "while True: pass"


@pytest.fixture
def lab(ugro: Ugro) -> Iterator[Lab]:
    """Whatever a test leaves is taken down, and must be gone then."""
    lab = Lab(StateDir(ugro.home))
    yield lab
    assert ugro("lab", "down").returncode == 0
    expect_nothing_left(lab)


def expect_nothing_left(lab: Lab) -> None:
    assert lab.processes() == {}
    assert not lab.home.lab.exists()
    assert groups_of(lab) == []


def groups_of(lab: Lab) -> list[Path]:
    hierarchy = cgroups.cpu_hierarchy()
    return cgroups.find(hierarchy, lab.group_name) if hierarchy else []


def document(ugro: Ugro, *words: str) -> dict[str, Any]:
    done = ugro(*words, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def healthy_nodes(ugro: Ugro) -> dict[str, dict[str, Any]]:
    nodes: list[dict[str, Any]] = json.loads(ugro("health", "--json").stdout)["nodes"]
    assert [node["name"] for node in nodes if node["status"] == "unreachable"] == []
    return {node["name"]: node for node in nodes}


def needs_cgroups(lab: Lab) -> None:
    shape = lab.shape()
    assert shape is not None
    if not shape.nodes[0].cgroup:
        pytest.skip("this user may make no control groups here")


# --- up, status, down ------------------------------------------------------------------------------------------


def test_a_lab_is_made_shown_and_taken_away_again(ugro: Ugro, lab: Lab) -> None:
    up = ugro("lab", "up")
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("node\tstatus\t")
    assert "the lab is up: nodes of speed 1, 0.5, 0.25" in up.stderr

    nodes = document(ugro, "lab", "status")["lab"]["nodes"]
    assert [(node["name"], node["speed"]) for node in nodes] == [("lab1", 1), ("lab2", 0.5), ("lab3", 0.25)]
    assert {node["throttle"] for node in nodes} <= {"cgroup", "duty-cycle"}
    assert all(node["pids"] for node in nodes)

    found = healthy_nodes(ugro)
    assert [found[node["name"]]["machine"]["root"] for node in nodes] == [
        f"{node['home']}/grid_workspace" for node in nodes
    ]
    assert [(node["role"], node["labels"]) for node in found.values()] == [
        ("master", ["lab"]),
        ("worker", ["lab"]),
        ("worker", ["lab"]),
    ]

    said = ugro("lab", "down").stderr.splitlines()
    assert said == [
        "the lab is down",
        "the agent continues, with this machine as its only node; end it: ugro agent stop",
    ]
    expect_nothing_left(lab)
    assert document(ugro, "agent", "status")["agent"]["cluster_file"] is None
    assert document(ugro, "lab", "status") == {"lab": None}
    again = ugro("lab", "down")
    assert (again.returncode, again.stderr.strip()) == (0, "no lab was up")
    assert ugro("--json", "lab", "down").stdout == ugro("lab", "down", "--json").stdout == '{"lab":null}\n'


@pytest.mark.proof
def test_each_node_has_a_home_of_its_own_and_knows_nothing_of_the_agents(ugro: Ugro, lab: Lab) -> None:
    assert ugro("lab", "up", "--nodes", "2").returncode == 0
    done = ugro("exec", "@lab", "--", "sh", "-c", 'echo "$HOME $PWD ${UGRO_HOME-none}"')
    assert sorted(done.stdout.splitlines()) == [
        f"lab{number} | {lab.root}/lab{number} {lab.root}/lab{number} none" for number in (1, 2)
    ]


@pytest.mark.proof
def test_a_lab_that_is_up_stays_as_it_is_until_other_numbers_are_asked_for(ugro: Ugro, lab: Lab) -> None:
    before = document(ugro, "lab", "up", "--speeds", "1,0.5")
    again = ugro("lab", "up")
    assert "the lab was up already: nodes of speed 1, 0.5," in again.stderr
    assert document(ugro, "lab", "status") == before  # the same processes

    changed = ugro("lab", "up", "--nodes", "3", "--speeds", "0.5")
    assert "the lab has changed: nodes of speed 0.5, 0.5, 0.5" in changed.stderr
    assert list(healthy_nodes(ugro)) == ["lab1", "lab2", "lab3"]
    assert not any(is_alive(pid) for node in before["lab"]["nodes"] for pid in node["pids"])


WRONG = {
    "--nodes 0": "1 to 64 nodes, not 0",
    "--nodes 65": "1 to 64 nodes, not 65",
    "--nodes many": "'many' is not a valid integer",
    "--nodes 1 --speeds 1,0.5": "2 speeds for 1 node",
    "--speeds 1,0": "'0' is not a speed",
    "--speeds 2": "'2' is not a speed",
    "--speeds fast": "'fast' is not a speed",
    "--gpus 99": "0 to 16 simulated GPUs",
}


def test_wrong_numbers_get_one_clear_error_and_make_nothing(ugro: Ugro, lab: Lab) -> None:
    inside = InProcess(ugro.home)
    for words, said in WRONG.items():
        done = inside("lab", "up", *words.split())
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert not lab.home.lab.exists()
    assert ugro("agent", "status").returncode == 5


@pytest.mark.proof
def test_a_lab_is_refused_where_the_agent_serves_another_cluster(ugro: Ugro, lab: Lab, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("nodes: {here: {transport: local}}\n")
    assert ugro("--cluster", str(other), "agent", "start").returncode == 0

    done = ugro("lab", "up")
    assert done.returncode == 6
    assert f"serves {other}" in done.stderr
    assert "hint:  give the lab an agent of its own: UGRO_HOME=~/.ugro-lab ugro lab up" in done.stderr
    assert not lab.home.lab.exists()
    assert ugro("lab", "down").returncode == 0
    assert document(ugro, "agent", "status")["agent"]["cluster_file"] == str(other)


@pytest.mark.proof
def test_a_lab_is_refused_while_a_job_runs_on_this_machine(ugro: Ugro, lab: Lab) -> None:
    assert ugro("run", "-d", "--", "sleep", "600").returncode == 0
    wait_until(lambda: "running" in ugro("status", "last").stdout, 30, "the job to run")
    done = ugro("lab", "up")
    assert (done.returncode, "job 1 sleep runs on this machine" in done.stderr) == (6, True), done.stderr
    assert ugro("cancel", "last").returncode == 0
    assert ugro("wait", "last").returncode != 0
    assert ugro("lab", "up", "--nodes", "1").returncode == 0


@pytest.mark.proof
def test_two_at_once_make_one_lab(ugro: Ugro, lab: Lab) -> None:
    both = [ugro.start("lab", "up", "--nodes", "2") for _ in range(2)]
    errors = [process.communicate(timeout=60)[1].decode() for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 6]), errors
    assert list(healthy_nodes(ugro)) == ["lab1", "lab2"]


def test_a_lab_command_leaves_the_lab_to_another_that_is_at_work(ugro: Ugro, lab: Lab) -> None:
    folder = os.open(ugro.home, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        for word in ("up", "down"):
            done = ugro("lab", word)
            assert (done.returncode, done.stderr.splitlines()[0]) == (6, "error: another lab command is running")
    finally:
        os.close(folder)


# --- after accidents -------------------------------------------------------------------------------------------


def kill_agent(ugro: Ugro, lab: Lab) -> None:
    os.kill(document(ugro, "agent", "status")["agent"]["pid"], signal.SIGKILL)


def forget_shape(ugro: Ugro, lab: Lab) -> None:
    (lab.home.lab / "lab.json").write_text("{")


def lose_cluster_file(ugro: Ugro, lab: Lab) -> None:
    lab.home.lab_cluster.unlink()


def lose_everything(ugro: Ugro, lab: Lab) -> None:
    shutil.rmtree(lab.home.lab)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("accident", "option"),
    [
        (kill_agent, []),
        (kill_agent, ["--no-cgroups"]),
        (forget_shape, []),
        (lose_cluster_file, ["--no-cgroups"]),
        (lose_everything, []),
    ],
)
def test_after_an_accident_a_lab_can_be_taken_down(
    ugro: Ugro, lab: Lab, accident: Callable[[Ugro, Lab], None], option: list[str]
) -> None:
    assert ugro("lab", "up", "--speeds", "1,0.5", *option).returncode == 0
    accident(ugro, lab)
    done = ugro("lab", "down")
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, "the lab is down")
    expect_nothing_left(lab)


@pytest.mark.proof
def test_a_lab_that_lost_its_agent_and_its_groups_is_mended_by_up(ugro: Ugro, lab: Lab) -> None:
    assert ugro("lab", "up", "--nodes", "2").returncode == 0
    kill_agent(ugro, lab)
    wait_until(lambda: not lab.processes(), 20, "the nodes to end with their agent")
    assert all(cgroups.remove(group) for group in groups_of(lab))

    done = ugro("lab", "up")
    assert done.returncode == 0, done.stderr
    assert list(healthy_nodes(ugro)) == ["lab1", "lab2"]


@pytest.mark.proof
def test_down_ends_all_that_carries_the_mark_and_nothing_else(ugro: Ugro, lab: Lab) -> None:
    assert ugro("lab", "up", "--nodes", "1").returncode == 0
    stubborn = ["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
    ours = subprocess.Popen(stubborn, env={**os.environ, MARK: f"{lab.root}/lab1"})
    stopped = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{lab.root}/lab1"})
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{lab.root}2/lab1"})
    try:
        stopped.send_signal(signal.SIGSTOP)
        assert ugro("lab", "down").returncode == 0
        assert ours.wait(10) == -signal.SIGKILL
        assert stopped.wait(10) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (ours, stopped, other):
            process.kill()
            process.wait(10)


def test_a_node_cannot_be_entered_once_its_lab_is_down(ugro: Ugro, lab: Lab, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "ugro.lab.enter", "--home", str(tmp_path), "true"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == f"the lab of {tmp_path} is down"


# --- speeds ----------------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize("option", [[], ["--no-cgroups"]], ids=["cgroups", "duty-cycle"])
def test_a_quarter_is_about_four_times_slower_than_one(ugro: Ugro, lab: Lab, option: list[str]) -> None:
    assert ugro("lab", "up", "--speeds", "1,0.25", *option).returncode == 0
    if not option:
        needs_cgroups(lab)
    seen: list[float] = []
    # The machine may be busy with other things, which no measurement can be blamed for.
    for _ in range(5):
        with lab.client() as client:
            fast, slow = measure(client, seconds=2)
        seen.append(fast.rounds_per_s / slow.rounds_per_s)
        if 2.5 <= seen[-1] <= 6:
            return
    pytest.fail(f"ratios of speed 1 to 0.25: {seen}")


def states(pids: list[int]) -> set[str]:
    stats = [processes.read(pid, "stat") for pid in pids]
    return {stat.rpartition(b")")[2].split()[0].decode() for stat in stats if stat}


def wait_until_in_state(pid: int, state: str) -> None:
    wait_until(lambda: states([pid]) == {state}, 10, f"process {pid} to be in state {state}")


@pytest.mark.proof
def test_without_control_groups_work_is_stopped_and_the_node_goes_on_answering(ugro: Ugro, lab: Lab) -> None:
    assert ugro("lab", "up", "--speeds", "0.1", "--no-cgroups").returncode == 0
    running = ugro.start("exec", "lab1", "--", sys.executable, "-c", BURN)
    try:

        def work() -> list[int]:
            return [pid for pid in lab.processes() if BURN.encode() in processes.read(pid, "cmdline")]

        (burner,) = wait_until(work, 20, "the work to begin")
        machinery = [pid for pid in lab.processes() if pid != burner]
        assert len(machinery) >= 3  # the node program, its guard over the work, the throttle
        for wanted in "TRTR":
            wait_until_in_state(burner, wanted)
            assert "T" not in states(machinery)
        with lab.client() as client:
            (report,) = client.health()
        assert report.facts is not None, report.error
    finally:
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=30)
    wait_until(lambda: not is_alive(burner), 10, "the work to end")


@pytest.mark.proof
def test_a_throttle_ends_with_its_node_program_and_leaves_nothing_stopped(ugro: Ugro, lab: Lab) -> None:
    assert ugro("lab", "up", "--speeds", "0.1", "--no-cgroups").returncode == 0
    bystander = subprocess.Popen(
        [sys.executable, "-c", BURN], env={**os.environ, MARK: f"{lab.root}/lab1"}, start_new_session=True
    )
    try:
        wait_until_in_state(bystander.pid, "T")  # slowed down like the node's own work
        throttles = [pid for pid in lab.processes() if b"ugro.lab.throttle" in processes.read(pid, "cmdline")]
        assert len(throttles) == 1
        ugro("agent", "stop")
        wait_until(lambda: not is_alive(throttles[0]), 10, "the throttle to end")
        assert states([bystander.pid]) == {"R"}
    finally:
        bystander.kill()
        bystander.wait(10)


# --- pretend GPUs ----------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.skipif(not shutil.which("cc"), reason="not installed: a C compiler")
def test_each_node_has_pretend_gpus_of_another_kind(ugro: Ugro, lab: Lab) -> None:
    assert ugro("lab", "up", "--nodes", "2", "--gpus", "2").returncode == 0
    facts = [node["facts"] for node in healthy_nodes(ugro).values()]
    assert [(fact["gpu_source"], len(fact["gpus"])) for fact in facts] == [("nvml", 2), ("nvml", 2)]
    names = [gpu["name"] for fact in facts for gpu in fact["gpus"]]
    assert names[0] == names[1] != names[2] == names[3]
    assert len({gpu["uuid"] for fact in facts for gpu in fact["gpus"]}) == 4


@pytest.mark.proof
def test_static_shares_are_by_the_models_of_the_gpus_and_a_dry_run_says_so(ugro: Ugro, lab: Lab) -> None:
    assert ugro("lab", "up", "--nodes", "2", "--gpus", "1").returncode == 0
    (ugro.home / "cwd" / "train.py").touch()
    done = ugro("launch", "train.py", "--nodes", "2", "--balance", "static", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    for node in plan["nodes"]:
        env = dict(node["ranks"][0]["env"])
        assert env["UGRO_BALANCE"] == "static"
        assert sorted(float(speed) for speed in env["UGRO_SPEEDS"].split(","))[-1] == 1
        assert env["UGRO_SPEEDS_SOURCE"] == "vendor figures for the GPU models"


@pytest.mark.proof
def test_without_a_compiler_a_stub_nvidia_smi_shows_the_gpus(ugro: Ugro, lab: Lab, tmp_path: Path) -> None:
    for tool in ("sh", "cat", "tr", "sleep"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    up = ugro("lab", "up", "--nodes", "2", "--gpus", "1", env={"PATH": str(tmp_path)})
    assert up.returncode == 0, up.stderr
    facts = [node["facts"] for node in healthy_nodes(ugro).values()]
    assert [(fact["gpu_source"], len(fact["gpus"])) for fact in facts] == [("nvidia-smi", 1)] * 2, facts


@pytest.mark.proof
def test_what_uses_the_lab_uses_its_cluster_file(ugro: Ugro, lab: Lab) -> None:
    assert ugro("lab", "up", "--nodes", "1").returncode == 0
    with Client(home=ugro.home) as client:
        assert client.agent().cluster_file == str(lab.home.lab_cluster)
        assert client.agent().cluster_name == "lab"
