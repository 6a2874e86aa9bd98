"""Real ranks of a training on this machine: each a process of its own, started as a launcher would start it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 100


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


def start(argv: Sequence[str], folder: Path, ranks: int, variables: Mapping[str, str] | None = None) -> Ranks:
    folder.mkdir(parents=True, exist_ok=True)
    port = str(_free_port())
    processes = []
    for rank in range(ranks):
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("UGRO_")},
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"},
            # The code beside these tests, also in a copy of the tree.
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONWARNINGS": "ignore"},
            **{"RESULT": str(folder / f"result_{rank}.json"), "UGRO_OUTPUT": str(folder / "output")},
            **{"UGRO_NODE": f"node{rank}", **(variables or {})},
        }
        with (folder / f"rank_{rank}.log").open("wb") as log:
            command = [sys.executable, "-u", *argv]
            processes.append(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT))
    return Ranks(processes, folder)


def metrics(path: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
