"""A stranger with three bare machines of which none has PyTorch: one job file, one command, and it trains.

``UGRO_SAY=1 pytest -s`` prints what each step took.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig.sshd import DEFAULT_PATH, SshdFarm, SshdNode

_ROOT = Path(__file__).parents[3]
_PYTHON = shutil.which("python3", path=DEFAULT_PATH)  # what the nodes find
_JOB = """\
script: train.py
args: --epochs 1
resources:
  nodes: 3
environment:
  packages: [torch==2.13.0, numpy]
  find_links: ['{wheels}']
  no_index: true
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """PyTorch for CPUs and what it needs, as a user's own download would have them."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.check_output([str(_PYTHON), "-c", code], text=True)
    folder = tmp_path / "wheels"
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary", ":all:"]
    argv += ["--python-version", version.strip(), "torch==2.13.0", "numpy"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot download torch==2.13.0: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture
def farm(farm_of: Farms) -> SshdFarm:
    if _PYTHON is None or _has_torch(_PYTHON):
        pytest.skip("the nodes' own Python has torch already, or there is none")
    found = farm_of(3)
    for node in found.nodes:  # a folder for temporary files of its own: in /tmp, others leave theirs, too
        temporary(node).mkdir()
        node.configure(variables=(("TMPDIR", str(temporary(node))),))
    return found


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_a_stranger_trains_on_three_bare_machines_with_one_job_file(
    ugro: Ugro, farm: SshdFarm, wheels: Path
) -> None:
    here = ugro.home / "cwd"
    shutil.copy(_ROOT / "examples" / "train_ddp.py", here / "train.py")
    (here / "job.yaml").write_text(_JOB.format(wheels=wheels))
    before = {node.name: listing(node) for node in farm.nodes}

    hosts = [node.name for node in farm.nodes]
    wrote = ugro("init", "--here", "--no-local", "--ssh-config", str(farm.ssh_config), *hosts)
    assert wrote.returncode == 0, wrote.stderr
    lacking = ugro("launch", "train.py", "--nodes", "3")
    assert lacking.returncode == 1, "without an environment it cannot run"
    assert "torch" in lacking.stderr

    first_s, first = launched(ugro)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "final loss" in first.stdout
    made = environments(ugro)
    assert len(made) == 1, "one environment for three equal machines"
    assert [held["node"] for held in made[0]["nodes"]] == hosts
    assert {name for name, _ in made[0]["packages"]} >= {"torch", "numpy"}

    second_s, second = launched(ugro)
    assert second.returncode == 0, second.stdout + second.stderr
    times = [[(held["node"], held["made_at"]) for held in one["nodes"]] for one in (made[0], environments(ugro)[0])]
    assert times[0] == times[1], "nothing was made again"
    assert {node.name: listing(node) for node in farm.nodes} == before, "nothing outside remote_root was touched"
    expect_no_temporary_files(ugro, farm)

    shown = ugro("node", "setup", "-f", "job.yaml", "--json")
    assert shown.returncode == 0, shown.stderr
    rows = json.loads(shown.stdout)["nodes"]
    assert {(row["torch"].partition("+")[0], row["seconds"]) for row in rows} == {("2.13.0", None)}
    if os.environ.get("UGRO_SAY"):
        size = made[0]["nodes"][0]["size_bytes"]
        sys.stdout.write(f"\nfirst launch {first_s:.1f} s, second {second_s:.1f} s, {size / 1e6:.0f} MB per node\n")


def launched(ugro: Ugro) -> tuple[float, subprocess.CompletedProcess[str]]:
    began = time.monotonic()
    done = ugro("launch", "-f", "job.yaml", timeout=600)
    return time.monotonic() - began, done


def environments(ugro: Ugro) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ugro("env", "ls", "--json").stdout)["environments"]
    return found


def expect_no_temporary_files(ugro: Ugro, farm: SshdFarm) -> None:
    first = farm.nodes[0]
    used = ugro("run", "--only", first.name, "--", "sh", "-c", "echo $TMPDIR")
    assert used.stdout == f"{temporary(first)}\n", "jobs keep their temporary files where we look"
    assert [path for node in farm.nodes for path in temporary(node).rglob("*")] == []


def temporary(node: SshdNode) -> Path:
    return node.directory / "tmp"


def listing(node: SshdNode) -> dict[str, int]:
    """Every file of the node's home folder outside ``remote_root``, and when it last changed."""
    found: dict[str, int] = {}
    for folder, folders, files in os.walk(node.home):
        if Path(folder) == node.home and "grid_workspace" in folders:
            folders.remove("grid_workspace")
        for name in (*folders, *files):
            path = Path(folder) / name
            found[str(path.relative_to(node.home))] = path.lstat().st_mtime_ns
    return found


def _has_torch(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0
