"""A Ray cluster of a head and a worker, to the result of a first task: UGRO against `ray start` by hand.

By hand means what Ray's documentation says: one command on the head's node over ssh, and then one on the worker's. Both
are real sshds on this machine, and both get one CPU, the same memory, and a dashboard. UGRO also compares the nodes,
finds ports and makes a token.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.rig.ray import run_driver
from tests.rig.sshd import SshdFarm
from tests.rig.waiting import end_all_with_variable

from bench.bars import Bar, Row, print_rows
from ugro.client.client import Client
from ugro.features.ray.client import start, wait, wait_stopped
from ugro.features.ray.model import ClusterWish, WorkerSize
from ugro.features.ray.operations import GetRayClusterAccess, StopRayCluster

_LIMIT_S = 180
_SHARE = 1.2
_MARK = "BENCH_RAY"
_MEMORY, _STORE = 600_000_000, 180_000_000
_SIZE = f"--memory={_MEMORY - _STORE} --object-store-memory={_STORE} --disable-usage-stats"


def measure(rounds: int) -> list[Bar]:
    with tempfile.TemporaryDirectory(prefix="bench") as folder, SshdFarm(Path(folder) / "farm", 2) as farm:
        nodes = {node.name: {"python": sys.executable} for node in farm.nodes}
        with _ugro(Path(folder) / "home", farm.cluster_yaml(nodes=nodes)) as client:
            rows = Row("ray start by hand"), Row("ugro cluster start")
            for _ in range(rounds):
                rows[0].seconds.append(_by_hand(farm))
                rows[1].seconds.append(_by_ugro(client))
    print_rows("a head, a worker and a first task", rows)
    return [Bar("a Ray cluster to its first task", rows[1].median_s, rows[0].median_s, "ray start by hand", _SHARE)]


@contextmanager
def _ugro(home: Path, cluster: Path) -> Iterator[Client]:
    with Client(home=home, cluster=cluster) as client:
        try:
            client.health()
            yield client
        finally:
            client.stop_agent()


def _by_ugro(client: Client) -> float:
    size = WorkerSize(cpus=1, memory_bytes=_MEMORY, object_store_bytes=_STORE)
    began = time.monotonic()
    start(client, ClusterWish(only=("n002",), head="n001", size=size))
    wait(client, "ray", timeout_s=_LIMIT_S)
    access = client.ask(GetRayClusterAccess("ray")).access
    with tempfile.NamedTemporaryFile("w") as token:  # mode 0600
        token.write(access.token)
        token.flush()
        _first_task({"RAY_ADDRESS": access.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token.name})
    took_s = time.monotonic() - began
    client.ask(StopRayCluster("ray"))
    wait_stopped(client, "ray")
    return took_s


def _by_hand(farm: SshdFarm) -> float:
    mark = secrets.token_hex(4)
    folders = [f"/tmp/b{mark}{number}" for number in (0, 1)]
    address = "127.0.0.2:6379"
    ray = f"{_MARK}={mark} RAY_AUTH_MODE=disabled {sys.executable} -m ray.scripts.scripts start"
    try:
        began = time.monotonic()
        head = f"--head --port=6379 --node-ip-address=127.0.0.2 --num-cpus=0 --temp-dir={folders[0]}"
        _ssh(farm, 0, f"{ray} {head} {_SIZE}")
        worker = f"--address={address} --node-ip-address=127.0.0.2 --num-cpus=1 --temp-dir={folders[1]}"
        # On two machines the defaults would do.
        _ssh(farm, 1, f"{ray} {worker} {_SIZE} --dashboard-agent-listen-port=52366")
        _first_task({"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"})
        return time.monotonic() - began
    finally:
        end_all_with_variable(_MARK, [mark])
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _ssh(farm: SshdFarm, node: int, command: str) -> None:
    argv = [*farm.ssh_argv(farm.nodes[node]), command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def _first_task(env: Mapping[str, str]) -> None:
    done = run_driver({**env, "PATH": os.environ["PATH"]})
    if done.stdout.strip() != "14":
        raise RuntimeError(f"the first task failed: {done.stderr}")
