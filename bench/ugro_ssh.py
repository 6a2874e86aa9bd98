"""UGRO's half of the SSH benchmark: a call over an open link, a probe, a health check of many nodes, a cold start."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until

from bench.peers_ssh import Measurement
from ugro.client.client import Client
from ugro.kernel.agent.operations import UseClusterFile
from ugro.kernel.links.link import Link
from ugro.kernel.links.model import NodeSpec, Status
from ugro.kernel.links.operations import CheckHealth
from ugro.kernel.links.transport import SshOptions

_WARM_UP_CALLS = 50
# The machine's own python3 may be a slow shim of a version manager, which would measure that and not us.
_PYTHON = shutil.which("python3", path="/usr/bin:/bin")


def measure_link(farm: SshdFarm, repeats: int) -> list[Measurement]:
    """One node: the smallest call, and a full probe."""
    return asyncio.run(_measure_link(farm, repeats))


async def _measure_link(farm: SshdFarm, repeats: int) -> list[Measurement]:
    node = farm.nodes[0]
    spec = NodeSpec(node.name, remote_root=f"{node.home}/ugro", python=_PYTHON)
    link = await Link.open(spec, SshOptions(config_file=str(farm.ssh_config)), timeout_s=30, env=dict(os.environ))
    try:
        call = await _timed(repeats, lambda: link.call("echo", {}, timeout_s=10))
        probe = await _timed(repeats, lambda: link.call("probe", {"gpu_timeout_s": 1.0}, timeout_s=10))
    finally:
        link.close()
    return [Measurement("ugro call", 1, "warm", call), Measurement("ugro full probe", 1, "warm", probe)]


async def _timed(repeats: int, once: Callable[[], Awaitable[object]]) -> list[float]:
    for _ in range(_WARM_UP_CALLS):
        await once()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        await once()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure_health(farm: SshdFarm, nodes: int, *, warm_repeats: int, cold_repeats: int) -> list[Measurement]:
    """A whole health check through client and agent: cold (no connection open) and warm."""
    first: list[float] = []
    cold: list[float] = []
    warm: list[float] = []
    cluster = _cluster_file(farm, nodes)
    with _agent() as client:
        for _ in range(cold_repeats + 1):
            # The very first contact also sends the node program; it is then kept on the node.
            (cold if first else first).append(_connect_all(client, cluster, nodes))
            _progress(f"ugro cold {nodes}: {(cold or first)[-1]:.2f} s")
            client.ask(UseClusterFile(None))
            _wait_for_sessions(farm)
        _connect_all(client, cluster, nodes)
        warm = [_check(client, nodes) for _ in range(warm_repeats + 5)][5:]
    return [
        Measurement("ugro, first contact ever", nodes, "cold", first),
        Measurement("ugro", nodes, "cold", cold),
        Measurement("ugro", nodes, "warm", warm),
    ]


def _connect_all(client: Client, cluster: Path, nodes: int) -> float:
    started = time.perf_counter()
    client.ask(UseClusterFile(str(cluster.absolute())))
    healthy: set[str] = set()
    while len(healthy) < nodes:
        healthy |= {report.name for report in client.follow(CheckHealth()) if report.status is not Status.UNREACHABLE}
        if time.perf_counter() - started > 120:
            raise RuntimeError(f"only {len(healthy)} of {nodes} nodes came up")
    return time.perf_counter() - started


def _check(client: Client, nodes: int) -> float:
    started = time.perf_counter()
    reports = client.health()
    elapsed_s = time.perf_counter() - started
    if len(reports) != nodes or any(report.facts is None for report in reports):
        raise RuntimeError(f"a health check of {nodes} nodes gave {len(reports)} reports, some without facts")
    return elapsed_s


@contextmanager
def _agent() -> Iterator[Client]:
    with tempfile.TemporaryDirectory(prefix="ugro") as home:
        client = Client(home=Path(home))
        try:
            client.agent()
            yield client
        finally:
            client.stop_agent()


def _cluster_file(farm: SshdFarm, nodes: int) -> Path:
    python = {"python": _PYTHON} if _PYTHON else {}
    path = farm.cluster_yaml(nodes={node.name: python for node in farm.nodes[:nodes]})
    lines = path.read_text()
    if nodes < len(farm.nodes):
        from ugro.kernel.config.edit import remove_node

        for node in farm.nodes[nodes:]:
            lines = remove_node(lines, node.name)
    chosen = path.with_name(f"cluster-{nodes}.yaml")
    chosen.write_text(lines)
    return chosen


def _wait_for_sessions(farm: SshdFarm) -> None:
    wait_until(lambda: not any(node.sessions() for node in farm.nodes), timeout_s=30, what="all sessions to end")


def _progress(text: str) -> None:
    print(text, file=sys.stderr)
