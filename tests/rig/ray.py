"""Ray clusters of tests: drivers that connect to them, their processes, and what they may not leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.rig.waiting import name_of, processes_with

LIMIT_S = 600
SHARED = Path("/dev/shm")
TASKS = """
import os, sys, ray
ray.init(logging_level="error", log_to_driver=False)

@ray.remote
def square(x):
    return x * x

print(sum(ray.get([square.remote(x) for x in range(int(sys.argv[1]))])))
"""
# Much faster than a driver that is refused: that tries for half a minute.
ASKS = """
import os
from ray._raylet import GcsClient
print(len(GcsClient(address=os.environ["RAY_ADDRESS"]).get_all_node_info(timeout=10)))
"""


def run_driver(
    env: Mapping[str, str], text: str = TASKS, *words: str, timeout: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """``env``: what ``ugro cluster env --json`` names."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    argv = [sys.executable, "-c", text, *(words or ("4",))]
    return subprocess.run(argv, env={**kept, **env}, capture_output=True, text=True, timeout=timeout, check=False)


def leftovers(key: str) -> list[str]:
    """Processes, and folders below /tmp, of the cluster with this key."""
    base = Path(f"/tmp/ugro-ray-{os.getuid()}")
    folders = [str(path) for path in base.glob(f"{key}-*")]
    mine = [f"{pid} {name_of(pid)}" for pid in processes_with(f"{base}/{key}-".encode())]
    return [*folders, *mine, *(f"{pid} {name_of(pid)}" for pid in processes_with(f'"id": "{key}"'.encode()))]


def process_of(key: str, number: int, name: str) -> int:
    """The pid of the raylet or gcs_server of a rank; 0 is the head's number."""
    folder = f"/tmp/ugro-ray-{os.getuid()}/{key}-{number}"
    found = [pid for pid in processes_with(folder.encode()) if name_of(pid) == name]
    assert len(found) == 1, f"{name} of rank {number}: {found}"
    return found[0]


def document(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)
