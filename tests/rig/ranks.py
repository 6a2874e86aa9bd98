"""Real ranks of a training on this machine: each a process of its own, started as a launcher would start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rig.ports import free_port

ROOT = Path(__file__).parents[2]
LIMIT_S = 100
_NOTING_THREADS = """
import atexit, json, os
from pathlib import Path

def note():
    names = [Path("/proc/self/task", thread, "comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    Path(os.environ["RESULT"]).write_text(json.dumps(names))

atexit.register(note)  # after all that is registered later
"""


@dataclass
class Ranks:
    processes: list[subprocess.Popen[bytes]]
    folder: Path

    def wait(self, timeout_s: float = LIMIT_S) -> list[int]:
        """Their exit codes."""
        deadline = time.monotonic() + timeout_s
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"ranks hang:\n{self.logs()}") from None
        finally:
            self.end()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def logs(self) -> str:
        names = sorted(self.folder.glob("rank_*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in names)

    def results(self) -> list[Any]:
        """What each rank's script left as its result."""
        assert self.wait(LIMIT_S) == [0] * len(self.processes), self.logs()
        return [json.loads((self.folder / f"result_{rank}.json").read_text()) for rank in range(len(self.processes))]


def start(
    argv: Sequence[str],
    folder: Path,
    ranks: int,
    variables: Mapping[str, str] | None = None,
    of_rank: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> Ranks:
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    given = variables or {}
    started = [start_one(argv, folder, (rank, ranks), port, {**given, **of_rank(rank)}) for rank in range(ranks)]
    return Ranks(started, folder)


def threads_at_exit(text: str, folder: Path, ranks: int) -> list[list[str]]:
    """The names of the threads that each rank of a script still has when its interpreter ends."""
    script = folder / "train.py"
    script.write_text(_NOTING_THREADS + text)
    return start([str(script)], folder, ranks).results()


def start_one(
    argv: Sequence[str], folder: Path, place: tuple[int, int], port: str, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """``place``: its number, and how many there are."""
    rank, ranks = place
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("UGRO_")},
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"},
        # The code beside these tests, also in a copy of the tree.
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONWARNINGS": "ignore"},
        **{"RESULT": str(folder / f"result_{rank}.json"), "UGRO_OUTPUT": str(folder / "output")},
        **{"UGRO_NODE": f"node{rank}", **(variables or {})},
    }
    with (folder / f"rank_{rank}.log").open("ab") as log:
        command = [sys.executable, "-u", *argv]
        return subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


@dataclass
class ElasticRanks:
    """With the store that they meet in, in a process of its own."""

    argv: Sequence[str]
    folder: Path
    count: int
    variables: Mapping[str, str]
    port: str
    store: subprocess.Popen[bytes]
    ranks: Ranks

    def start_again(self, rank: int) -> None:
        """The process of a rank that has ended."""
        self.ranks.processes[rank].wait(LIMIT_S)
        more = {**self.variables, "AGAIN": "1"}
        self.ranks.processes[rank] = start_one(self.argv, self.folder, (rank, self.count), self.port, more)

    def end(self) -> None:
        self.ranks.end()
        self.store.kill()
        self.store.wait()


def start_elastic(argv: Sequence[str], folder: Path, ranks: int, variables: Mapping[str, str]) -> ElasticRanks:
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    variables = {"UGRO_MIN_RANKS": "1", **variables}
    store = start_one(["-m", "ugro.train.elastic_meeting"], folder, (ranks, ranks), port)
    started = Ranks([start_one(argv, folder, (rank, ranks), port, variables) for rank in range(ranks)], folder)
    return ElasticRanks(argv, folder, ranks, variables, port, store, started)


def metrics(path: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]
