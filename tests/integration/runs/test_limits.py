"""A run has the cores and the memory that it asked for, and no more, where the node can see to it."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig.nodeprogram import LocalNode
from tests.rig.waiting import wait_until
from ugro.kernel.jobs.engine.runs import parse_status
from ugro.node.process import cgroup
from ugro.node.process.cgroup import CPU, MEMORY

USER = 4321
HUNGRY = "held = [bytearray(1 << 20) for _ in range(300)]"  # MiB, and no more if nothing stops it
CORES = "import os, time; cores = os.sched_getaffinity(0); print(len(cores), *cores, flush=True); time.sleep(60)"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user, and control groups, need root")
needs_groups = pytest.mark.skipif(
    not {CPU, MEMORY} <= set(cgroup.detect()), reason="no control groups can be made here"
)


def spec(code: str, *, python: str = sys.executable, **limits: int) -> dict[str, Any]:
    return {"ranks": [{"rank": 0, "argv": [python, "-c", code]}], **limits}


def ended(node: LocalNode, job: str) -> dict[str, Any]:
    file = node.run_dir(job, 1) / "exit.json"
    wait_until(file.exists, 60, f"the exit record of {job}")
    return dict(json.loads(file.read_text()))


def state(node: LocalNode, job: str) -> dict[str, Any]:
    return dict(json.loads((node.run_dir(job, 1) / "state.json").read_text()))


@pytest.fixture
def users_node() -> Iterator[LocalNode]:
    """A node of a user who may make no control groups. Not in pytest's folder, which other users cannot enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, USER, USER)
        as_user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        node = LocalNode(Path(folder), prefix=as_user, python="/usr/bin/python3")
        try:
            yield node
        finally:
            node.close()


@needs_groups
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_that_takes_more_memory_than_it_asked_for_is_ended_and_that_is_said(
    node: LocalNode, is_shared: bool
) -> None:
    more = {"shared": True} if is_shared else {}
    link = node.link()
    node.call(link, "start", job="big", attempt=1, spec={**spec(HUNGRY, memory_bytes=64 << 20, cpus=1), **more})
    record = ended(node, "big")
    assert record["outcome"] == "oom"
    [rank] = record["ranks"]
    assert (rank["signal"], rank["is_oom"], rank["reached_bytes"]) == (9, True, 64 << 20)
    ways = state(node, "big")["limits"]
    assert set(ways) == {"cpus", "memory"}
    assert all(way.startswith("cgroup") for way in ways.values())
    name = f"big.1-{zlib.crc32(os.fsencode(node.run_dir('big', 1))):08x}"
    wait_until(lambda: not _groups(name), 10, "its control groups to go")


@needs_groups
def test_a_run_within_its_limits_and_one_without_are_left_alone(node: LocalNode) -> None:
    link = node.link()
    node.call(link, "start", job="small", attempt=1, spec=spec("bytearray(8 << 20)", memory_bytes=256 << 20))
    node.call(link, "start", job="free", attempt=1, spec=spec("bytearray(8 << 20)"))
    assert ended(node, "small")["outcome"] == ended(node, "free")["outcome"] == "succeeded"
    assert "limits" not in state(node, "free")


@needs_groups
def test_the_control_groups_of_a_run_whose_supervisor_was_killed_go_with_its_clean_up(node: LocalNode) -> None:
    link = node.link()
    node.call(link, "start", job="lost", attempt=1, spec=spec("import time; time.sleep(60)", cpus=1))
    name = f"lost.1-{zlib.crc32(os.fsencode(node.run_dir('lost', 1))):08x}"
    assert _groups(name)
    os.kill(node.supervisor("lost", 1), signal.SIGKILL)
    assert node.call(link, "stop", job="lost", attempt=1)["run"]["exit"]["outcome"] == "lost"
    assert not _groups(name)


@needs_root
def test_without_control_groups_runs_are_bound_to_cores_of_their_own_and_memory_is_bookkeeping(
    users_node: LocalNode,
) -> None:
    if os.cpu_count() == 1:
        pytest.skip("one core is everybody's")
    link = users_node.link()
    facts = users_node.wait(link.call("probe", {"gpu_timeout_s": 1}, timeout_s=10))
    assert facts["limits"] == {"cpus": "affinity", "memory": "none"}
    cores = []
    for job in ("one", "two", "three"):
        sleeper = spec(CORES, python="/usr/bin/python3", cpus=1, memory_bytes=64 << 20)
        users_node.call(link, "start", job=job, attempt=1, spec=sleeper)
        log = users_node.run_dir(job, 1) / "logs" / "rank_0.log"
        cores.append(wait_until(log.read_text, 10, "its cores").split())
        assert state(users_node, job)["limits"] == {"cpus": "affinity", "memory": "none"}
    assert [count for count, *_ in cores] == ["1", "1", "1"]
    if os.cpu_count() == 2:
        assert cores[0] != cores[1]
    for job in ("one", "two", "three"):
        users_node.call(link, "stop", job=job, attempt=1, grace_s=0.0)


def _groups(name: str) -> list[str]:
    folders = {home.folder for home in cgroup.detect().values() if os.path.isdir(home.folder)}
    return [entry for folder in folders for entry in os.listdir(folder) if name in entry]


def test_a_limit_that_was_reached_comes_with_the_status_of_a_run() -> None:
    rank = {"rank": 0, "signal": 9, "is_oom": True, "reached_bytes": 1 << 30}
    end = {"outcome": "oom", "ranks": [rank]}
    answer = {"job": "1", "attempt": 1, "status": "exited", "is_claimed": True, "exit": end}
    assert parse_status(answer).ranks[0].reached_bytes == 1 << 30


@pytest.mark.proof
@needs_groups
def test_a_user_sees_which_limit_was_reached_and_how_a_node_holds_jobs_to_theirs(farm_of: Farms, ugro: Ugro) -> None:
    ugro.cluster = farm_of(1).cluster_yaml()
    answer = ugro("run", "--no-sync", "--memory", "64MiB", "--cpus", "1", "--", "/usr/bin/python3", "-c", HUNGRY)
    assert answer.returncode == 137
    status = ugro("status", "last").stdout
    assert "the job reached its memory limit of 64.0 MiB" in status
    assert "ask for more with --memory" in status
    assert "limits     cpus and memory of jobs are limited by control groups" in ugro("node", "show", "n001").stdout
