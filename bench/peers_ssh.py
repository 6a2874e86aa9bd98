"""How fast others run a small command on many nodes by SSH: OpenSSH, pdsh, parallel-ssh, paramiko, asyncssh.

Only measures; tables and UGRO's own figures are made elsewhere. Give it a farm with ``wrapped=False``: the
wrapper that makes the nodes unequal takes milliseconds per command, which would count against the peers.
Every answer is checked, and a peer that fails ends the run: a fast wrong answer is no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import asyncssh
import paramiko
from pssh.clients import ParallelSSHClient
from pssh.config import HostConfig
from tests.rig.sshd import SshdFarm, SshdNode
from tests.rig.waiting import descendants, wait_until

COMMAND = "cat /proc/loadavg"

_LOADAVG = re.compile(r"(\d+\.\d\d ){3}\d+/\d+ \d+$")
_CALL_TIMEOUT_S = 60
_BUDGET_S = 90  # a figure gets no further repeats once it has taken this long
_WARM_UP_CALLS = 10  # connections and interpreters get faster over their first calls
_THREADS = 20
_PDSH_FANOUT = 32

Kind = Literal["warm", "cold"]
Run = Callable[[], list[str]]
# Gives a function that runs the command on all nodes. Its first call connects; later ones find that done.
Peer = Callable[[SshdFarm, Sequence[SshdNode]], AbstractContextManager[Run]]


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str
    nodes: int
    kind: Kind
    seconds: list[float]  # one per repeat: until all nodes have answered

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min_s(self) -> float:
        return min(self.seconds)


def measure_warm(farm: SshdFarm, nodes: int, repeats: int) -> list[Measurement]:
    """One command on ``nodes`` nodes that have been connected for a while.

    Where a peer leaves TCP_NODELAY off, a call takes 6 or 48 ms as chance has it (Nagle's algorithm against
    delayed acknowledgements): show the minimum beside the median, and give it 30 repeats or more.
    """

    def seconds_of(name: str, peer: Peer, chosen: Sequence[SshdNode]) -> list[float]:
        with peer(farm, chosen) as run:
            once = partial(_timed, name, run, len(chosen))
            _repeated(once, _WARM_UP_CALLS)
            return _repeated(once, repeats)

    return _measure(farm, "warm", _warm_peers(), nodes, seconds_of)


def measure_cold(farm: SshdFarm, nodes: int, repeats: int) -> list[Measurement]:
    """Connect, log in and run one command on ``nodes`` nodes. Closing the connections is not counted."""

    def seconds_of(name: str, peer: Peer, chosen: Sequence[SshdNode]) -> list[float]:
        def once() -> float:
            with peer(farm, chosen) as run:
                seconds = _timed(name, run, len(chosen))
            _settle(farm)
            return seconds

        return _repeated(once, repeats)

    return _measure(farm, "cold", _cold_peers(), nodes, seconds_of)


def _warm_peers() -> dict[str, Peer]:
    return {
        "ssh, ControlMaster": control_master,
        "parallel-ssh": parallel_ssh,
        "paramiko": partial(paramiko_threads, nodelay=False),
        "paramiko, TCP_NODELAY": partial(paramiko_threads, nodelay=True),
        "asyncssh": asyncssh_tasks,
    }


def _cold_peers() -> dict[str, Peer]:
    by_pdsh: dict[str, Peer] = {f"pdsh -f {_PDSH_FANOUT}": pdsh} if shutil.which("pdsh") else {}
    return {
        "ssh, one after the other": partial(ssh_processes, at_once=1),
        "ssh, 20 at once": partial(ssh_processes, at_once=20),
        "ssh, 32 at once": partial(ssh_processes, at_once=32),
        **by_pdsh,
        "parallel-ssh": parallel_ssh,
        "paramiko": partial(paramiko_threads, nodelay=False),
        "paramiko, TCP_NODELAY": partial(paramiko_threads, nodelay=True),
        "asyncssh": asyncssh_tasks,
    }


@contextmanager
def ssh_processes(farm: SshdFarm, nodes: Sequence[SshdNode], *, at_once: int) -> Iterator[Run]:
    with ThreadPoolExecutor(at_once) as pool:
        yield lambda: list(pool.map(_output_of, (farm.ssh_argv(node, COMMAND) for node in nodes)))


@contextmanager
def control_master(farm: SshdFarm, nodes: Sequence[SshdNode]) -> Iterator[Run]:
    # Not below the farm's directory: the path of a socket may have about 100 characters.
    with tempfile.TemporaryDirectory(prefix="cm") as sockets, ThreadPoolExecutor(_THREADS) as pool:

        def argv(node: SshdNode, *options: str) -> list[str]:
            words = farm.ssh_argv(node)
            return [*words[:-1], "-o", f"ControlPath={sockets}/%n", *options, words[-1]]

        try:
            masters = (argv(node, "-fN", "-M", "-o", f"ControlPersist={10 * _BUDGET_S}") for node in nodes)
            list(pool.map(_call, masters))
            yield lambda: list(pool.map(_output_of, ([*argv(node), COMMAND] for node in nodes)))
        finally:
            list(pool.map(partial(_call, check=False), (argv(node, "-O", "exit") for node in nodes)))


@contextmanager
def pdsh(farm: SshdFarm, nodes: Sequence[SshdNode]) -> Iterator[Run]:
    environment = {**os.environ, "PDSH_SSH_ARGS": f"-F {farm.ssh_config} -oBatchMode=yes %h"}
    names = ",".join(node.name for node in nodes)
    argv = ["pdsh", "-R", "ssh", "-f", str(_PDSH_FANOUT), "-w", names, COMMAND]

    def run() -> list[str]:
        return [line.partition(": ")[2] for line in _output_of(argv, environment).splitlines()]

    yield run


@contextmanager
def parallel_ssh(farm: SshdFarm, nodes: Sequence[SshdNode]) -> Iterator[Run]:
    common: dict[str, Any] = {"allow_agent": False, "identity_auth": False, "num_retries": 1}
    key = str(farm.client_key)
    configs = [HostConfig(user=farm.user, port=node.port, private_key=key, **common) for node in nodes]
    hosts = [node.host for node in nodes]
    options = {"host_config": configs, "pool_size": len(nodes), "timeout": _CALL_TIMEOUT_S}
    clients = [ParallelSSHClient(hosts, **options)]

    def run() -> list[str]:
        answers = clients[0].run_command(COMMAND, read_timeout=_CALL_TIMEOUT_S)
        return ["\n".join(answer.stdout) for answer in answers]

    try:
        yield run
    finally:
        # It disconnects when it is collected, and has no other way to.
        clients.clear()
        gc.collect()


@contextmanager
def paramiko_threads(farm: SshdFarm, nodes: Sequence[SshdNode], *, nodelay: bool) -> Iterator[Run]:
    clients: dict[str, paramiko.SSHClient] = {}

    def run_on(node: SshdNode) -> str:
        if node.name not in clients:
            clients[node.name] = _paramiko_client(farm, node, nodelay)
        stdout = clients[node.name].exec_command(COMMAND, timeout=_CALL_TIMEOUT_S)[1]
        return str(stdout.read().decode())

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            yield lambda: list(pool.map(run_on, nodes))
        finally:
            for client in clients.values():
                client.close()


def _paramiko_client(farm: SshdFarm, node: SshdNode, nodelay: bool) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    client.load_host_keys(str(farm.known_hosts))
    connection = socket.create_connection((node.host, node.port), timeout=_CALL_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, nodelay)
    client.connect(
        node.host,
        node.port,
        farm.user,
        key_filename=str(farm.client_key),
        allow_agent=False,
        look_for_keys=False,
        sock=connection,
    )
    return client


@contextmanager
def asyncssh_tasks(farm: SshdFarm, nodes: Sequence[SshdNode]) -> Iterator[Run]:
    connections: dict[str, asyncssh.SSHClientConnection] = {}

    async def run_on(node: SshdNode) -> str:
        if node.name not in connections:
            connections[node.name] = await _asyncssh_connection(farm, node)
        return str((await connections[node.name].run(COMMAND, check=True)).stdout)

    async def run_on_all() -> list[str]:
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            return await asyncio.gather(*map(run_on, nodes))

    async def close_all() -> None:
        for connection in connections.values():
            connection.close()
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            await asyncio.gather(*(connection.wait_closed() for connection in connections.values()))

    with asyncio.Runner() as runner:
        try:
            yield lambda: runner.run(run_on_all())
        finally:
            runner.run(close_all())


async def _asyncssh_connection(farm: SshdFarm, node: SshdNode) -> asyncssh.SSHClientConnection:
    return await asyncssh.connect(
        node.host,
        node.port,
        username=farm.user,
        client_keys=[str(farm.client_key)],
        known_hosts=str(farm.known_hosts),
        agent_path=None,
        config=None,
    )


def _measure(
    farm: SshdFarm,
    kind: Kind,
    peers: Mapping[str, Peer],
    nodes: int,
    seconds_of: Callable[[str, Peer, Sequence[SshdNode]], list[float]],
) -> list[Measurement]:
    chosen = farm.nodes[:nodes]
    if len(chosen) != nodes:
        raise ValueError(f"the farm has {len(chosen)} nodes, not {nodes}")
    measurements = []
    for name, peer in peers.items():
        measurement = Measurement(name, nodes, kind, seconds_of(name, peer, chosen))
        _settle(farm)
        print(_line(measurement), file=sys.stderr, flush=True)
        measurements.append(measurement)
    return measurements


def _repeated(once: Callable[[], float], repeats: int) -> list[float]:
    deadline = time.monotonic() + _BUDGET_S
    seconds = [once()]
    while len(seconds) < repeats and time.monotonic() < deadline:
        seconds.append(once())
    return seconds


def _timed(name: str, run: Run, nodes: int) -> float:
    started = time.perf_counter()
    answers = run()
    seconds = time.perf_counter() - started
    wrong = [answer for answer in answers if not _LOADAVG.match(answer)]
    if wrong or len(answers) != nodes:
        raise RuntimeError(f"{name}: {len(answers)} answers from {nodes} nodes, wrong ones: {wrong[:3]}")
    return seconds


def _settle(farm: SshdFarm) -> None:
    """Waits until nothing of the last measurement runs on a node: it would slow down the next."""
    servers = [node.pid for node in farm.nodes if node.pid is not None]
    deadline = time.monotonic() + _CALL_TIMEOUT_S / 6
    while descendants(servers) and time.monotonic() < deadline:
        time.sleep(0.05)
    # Some peers leave their connections to the garbage collector, which may take its time.
    for node in farm.nodes:
        if node.sessions():
            node.kill_sessions()
    wait_until(lambda: not descendants(servers), _CALL_TIMEOUT_S, "the peer's sessions to end")


def _output_of(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    limit_s = _CALL_TIMEOUT_S
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _call(argv: Sequence[str], *, check: bool = True) -> None:
    # Output to nowhere: a master that went to the background would keep a pipe open.
    nowhere = subprocess.DEVNULL
    subprocess.run(argv, stdin=nowhere, stdout=nowhere, stderr=nowhere, timeout=_CALL_TIMEOUT_S, check=check)


def _line(measurement: Measurement) -> str:
    median_ms, min_ms = measurement.median_s * 1000, measurement.min_s * 1000
    start = f"{measurement.kind}  {measurement.nodes:4} nodes  {measurement.name:26}"
    return f"{start} min {min_ms:9.2f} ms  median {median_ms:9.2f} ms  of {len(measurement.seconds)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10], help="each number is measured")
    parser.add_argument("--warm-repeats", type=int, default=30)
    parser.add_argument("--cold-repeats", type=int, default=5)
    parser.add_argument("--wrapped", action="store_true", help="with the rig's wrapper, to see what it costs")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="farm") as directory,
        SshdFarm(Path(directory), max(chosen.nodes), wrapped=chosen.wrapped) as farm,
    ):
        for nodes in chosen.nodes:
            measure_warm(farm, nodes, chosen.warm_repeats)
            measure_cold(farm, nodes, chosen.cold_repeats)


if __name__ == "__main__":
    main()
