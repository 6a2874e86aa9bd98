"""What dies of a Ray cluster comes back, is shown, and leaves nothing; strangers are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.ray.conftest import SMALL, Clusters, Nodes
from tests.rig.agent import end_agent
from tests.rig.ray import LIMIT_S, document, leftovers, process_of, run_driver
from tests.rig.waiting import is_alive, processes_with, wait_until

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]

COUNTER = """
import os, ray
ray.init(namespace="tests", logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=0.1, lifetime="detached", name="counter", get_if_exists=True)
class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count

print(ray.get(Counter.remote().add.remote(), timeout=90))
"""

LEAVES = """
import subprocess, sys, ray
ray.init(logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=0)
class Parent:
    def leave(self, mark):
        subprocess.Popen(["setsid", "sleep", mark], start_new_session=True)

ray.get(Parent.options(lifetime="detached", name="parent").remote().leave.remote(sys.argv[1]))
print("left")
"""


def shown(ugro: Ugro, name: str = "ray") -> dict[str, Any]:
    found: dict[str, Any] = document(ugro("cluster", "status", name, "--json"))["cluster"]
    return found


def is_back(ugro: Ugro, part: str, index: int | None = None) -> bool:
    found = shown(ugro)
    one = found[part] if index is None else found[part][index]
    return bool(one["restarts"] and one["is_ready"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
def test_a_raylet_that_dies_is_started_again(
    ugro: Ugro, nodes: Nodes, clusters: Clusters, number: signal.Signals
) -> None:
    nodes(2)
    key = clusters.start()
    os.kill(process_of(key, 2, "raylet"), number)
    wait_until(lambda: is_back(ugro, "workers", 1), LIMIT_S, "the worker")
    assert run_driver(clusters.env()).stdout.strip() == "14"
    assert shown(ugro)["workers"][0]["restarts"] == 0


def test_a_head_that_is_killed_comes_back_with_its_state(ugro: Ugro, nodes: Nodes, clusters: Clusters) -> None:
    nodes(1)
    key = clusters.start()
    address = shown(ugro)["address"]
    assert run_driver(clusters.env(), COUNTER).stdout.strip() == "1"

    os.kill(process_of(key, 0, "gcs_server"), signal.SIGKILL)
    wait_until(lambda: is_back(ugro, "head"), LIMIT_S, "the head")
    assert run_driver(clusters.env(), COUNTER).stdout.strip() == "2"
    found = shown(ugro)
    assert (found["address"], found["workers"][0]["restarts"]) == (address, 0)


def test_an_agent_that_is_killed_starts_nothing_twice(ugro: Ugro, nodes: Nodes, clusters: Clusters) -> None:
    nodes(1)
    assert ugro("cluster", "start", "--detach", *SMALL).returncode == 0
    end_agent(ugro.home)
    waited = document(ugro("cluster", "start", "--name", "other", *SMALL, "--json", "--detach"))
    assert waited["cluster"]["name"] == "other"
    end_agent(ugro.home)
    wait_until(lambda: shown(ugro)["workers"][0]["is_ready"], LIMIT_S, "the first cluster")

    names = [job["name"] for job in document(ugro("status", "--json"))["jobs"]]
    assert sorted(name for name in names if name.startswith("ray-")) == ["ray-head", "ray-worker-1"]
    keys = [shown(ugro, name)["id"] for name in ("ray", "other")]
    for name, key in zip(("ray", "other"), keys, strict=True):
        assert ugro("cluster", "stop", name, timeout=LIMIT_S).returncode == 0
        assert leftovers(key) == []


def test_two_clusters_run_side_by_side_and_a_foreign_ray_survives(
    ugro: Ugro, nodes: Nodes, clusters: Clusters, tmp_path: Path
) -> None:
    nodes(1)
    with foreign_ray(tmp_path) as foreign:
        clusters.start(name="one")
        clusters.start(name="two")
        assert len({shown(ugro, name)["address"] for name in ("one", "two")}) == 2
        assert run_driver(clusters.env("one")).stdout.strip() == "14"
        assert run_driver({**clusters.env("one"), **_token_of(clusters, "two")}).returncode != 0
        assert ugro("cluster", "stop", "one", timeout=LIMIT_S).returncode == 0
        assert run_driver(clusters.env("two")).stdout.strip() == "14"
        assert ugro("cluster", "stop", "two", timeout=LIMIT_S).returncode == 0
        assert is_alive(foreign)


def _token_of(clusters: Clusters, name: str) -> dict[str, str]:
    return {"RAY_AUTH_TOKEN_PATH": clusters.env(name)["RAY_AUTH_TOKEN_PATH"]}


@contextmanager
def foreign_ray(folder: Path) -> Iterator[int]:
    """The raylet of a Ray that somebody else started, with Ray's own defaults as far as they can be."""
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--include-dashboard=false"]
    # A short path: sockets are in it.
    own = Path(f"/tmp/f{os.getpid()}")
    more = ["--num-cpus=0", "--object-store-memory=80000000", "--memory=100000000", f"--temp-dir={own}"]
    words = [*argv, *more, "--port=6379", "--disable-usage-stats"]
    env = {**os.environ, "HOME": str(folder)}  # a token in somebody's home would count
    with (folder / "foreign.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=env)
    try:
        raylets = wait_until(lambda: _raylets(own), LIMIT_S, "a foreign raylet")
        yield raylets[0]
    finally:
        process.terminate()
        process.wait(30)
        subprocess.run(["rm", "-rf", str(own)], check=True)


def _raylets(folder: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"raylet/raylet .*{folder}/"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def test_what_a_task_left_behind_ends_with_the_cluster(ugro: Ugro, nodes: Nodes, clusters: Clusters) -> None:
    nodes(1)
    clusters.start()
    mark = f"{os.getpid()}.{os.getpid()}"
    assert run_driver(clusters.env(), LEAVES, mark).stdout.endswith("left\n")
    assert processes_with(f"sleep\0{mark}".encode())
    assert ugro("cluster", "stop", timeout=LIMIT_S).returncode == 0
    assert processes_with(f"sleep\0{mark}".encode()) == []


def test_it_grows_and_shrinks(ugro: Ugro, nodes: Nodes, clusters: Clusters) -> None:
    nodes(2)
    clusters.start("--nodes", "1")
    grown = document(ugro("cluster", "scale", "2", "--json", timeout=LIMIT_S))["cluster"]
    assert {worker["node"] for worker in grown["workers"]} == {"n001", "n002"}
    assert all(worker["is_ready"] for worker in grown["workers"])
    refused = ugro("cluster", "scale", "500", timeout=LIMIT_S)
    assert (refused.returncode, "there is room for" in refused.stderr) == (3, True)
    shrunk = document(ugro("cluster", "scale", "1", "--json", timeout=LIMIT_S))["cluster"]
    assert [worker["number"] for worker in shrunk["workers"]] == [1]
    wait_until(
        lambda: document(ugro("status", "ray-worker-2", "--json"))["job"]["state"] == "cancelled", 60, "its end"
    )
    assert ugro("cancel", "ray-worker-1").returncode == 0
    ugro("wait", "ray-worker-1", timeout=LIMIT_S)
    replaced = document(ugro("cluster", "scale", "1", "--json", timeout=LIMIT_S))["cluster"]
    assert [worker["number"] for worker in replaced["workers"]] == [3]
    assert run_driver(clusters.env()).stdout.strip() == "14"
