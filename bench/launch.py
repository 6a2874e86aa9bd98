"""Three ranks on three nodes: ``ugro launch`` against three ``ssh NODE torchrun …`` typed by hand, all at once.

The agent runs and its links are open, as they are for every launch but the first. The commands by hand have what helps
them most: they are typed at the same instant, and the ranks are told where to meet.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.rig.sshd import SshdFarm
from tests.rig.waiting import wait_until

from bench.bars import Bar, Row, print_rows
from ugro.client.client import Client

_RANKS = 3
_LIMIT_S = 120.0
_SCRIPT = Path(__file__).with_name("training.py")
_COMMANDS = Path(sys.executable).parent  # where ugro and torchrun are installed


@dataclass(slots=True)
class Launch:
    """Seconds from the command to what every rank has done."""

    name: str
    start: Callable[[Path], None]  # returns when the ranks have ended
    first_line: Row = field(init=False)
    first_step: Row = field(init=False)

    def __post_init__(self) -> None:
        self.first_line = Row(self.name)
        self.first_step = Row(self.name)


def measure(rounds: int) -> list[Bar]:
    if find_spec("torch") is None:
        print_rows("three ranks on three nodes", [Row("torch", remark="not installed")])
        return []
    with (
        tempfile.TemporaryDirectory(prefix="bench") as folder,
        SshdFarm(Path(folder) / "farm", _RANKS, wrapped=False) as farm,
        _ugro(farm) as by_ugro,
    ):
        ours, by_hand = Launch("ugro launch -d", by_ugro), Launch("ssh … torchrun, three at once", _by_hand(farm))
        for number in range(rounds + 1):
            for launch in (ours, by_hand):
                _measure_once(launch, Path(folder), counts=number > 0)  # the first one runs with cold caches
    print_rows("from the command to every rank's first line", [ours.first_line, by_hand.first_line])
    print_rows("from the command to every rank's first step", [ours.first_step, by_hand.first_step])
    return [
        _bar("three ranks' first line", ours.first_line, by_hand.first_line, 1 / 10),
        _bar("three ranks' first training step", ours.first_step, by_hand.first_step, 0.6),
    ]


def _bar(claim: str, ours: Row, peer: Row, share: float) -> Bar:
    return Bar(claim, ours.median_s, peer.median_s, peer.name, share)


def _measure_once(launch: Launch, folder: Path, *, counts: bool) -> None:
    notes = Path(tempfile.mkdtemp(dir=folder, prefix="notes"))
    started = time.time()
    launch.start(notes)
    line_s, step_s = (_latest(notes, what) - started for what in ("first-line", "first-step"))
    print(f"{launch.name}: first line {line_s:.3f} s, first step {step_s:.3f} s", file=sys.stderr)
    if counts:
        launch.first_line.seconds.append(line_s)
        launch.first_step.seconds.append(step_s)


def _latest(notes: Path, what: str) -> float:
    return max(float((notes / f"{what}.{rank}").read_text()) for rank in range(_RANKS))


@contextmanager
def _ugro(farm: SshdFarm) -> Iterator[Callable[[Path], None]]:
    nodes = {node.name: {"python": sys.executable} for node in farm.nodes}
    cluster = farm.cluster_yaml(nodes=nodes, cluster={"master_ip": farm.nodes[0].host})
    home = farm.directory / "ugro"
    environment = {**os.environ, "UGRO_HOME": str(home), "UGRO_CLUSTER": str(cluster)}
    code = farm.directory / "code"  # the script's folder is sent, so it contains nothing else
    code.mkdir()
    shutil.copy(_SCRIPT, code)

    with Client(home=home, cluster=cluster) as client:

        def start(notes: Path) -> None:
            argv = [str(_COMMANDS / "ugro"), "launch", "-d", "--nodes", str(_RANKS), _SCRIPT.name, str(notes)]
            subprocess.run(argv, env=environment, cwd=code, check=True, capture_output=True, timeout=_LIMIT_S)
            job = client.jobs.wait("last", timeout_s=_LIMIT_S)
            if job.exit_code != 0:
                raise RuntimeError(f"the launch failed: {job.reason}")

        try:
            wait_until(lambda: all(report.facts for report in client.health()), _LIMIT_S, "all links to open")
            yield start
        finally:
            client.stop_agent()


def _by_hand(farm: SshdFarm) -> Callable[[Path], None]:
    def start(notes: Path) -> None:
        host, port = farm.nodes[0].host, _free_port(farm.nodes[0].host)
        typed = [
            *(str(_COMMANDS / "torchrun"), f"--nnodes={_RANKS}", "--nproc-per-node=1"),
            *(f"--master-addr={host}", f"--master-port={port}"),
        ]
        argvs = [
            farm.ssh_argv(node, shlex.join([*typed, f"--node-rank={rank}", str(_SCRIPT), str(notes)]))
            for rank, node in enumerate(farm.nodes)
        ]
        quiet = subprocess.DEVNULL
        processes = [subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet) for argv in argvs]
        codes = [process.wait(_LIMIT_S) for process in processes]
        if any(codes):
            raise RuntimeError(f"ssh … torchrun ended with {codes}")

    return start


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
