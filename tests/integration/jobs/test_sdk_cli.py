"""Scripts that import ``ugro.train`` on nodes whose Python does not have it: UGRO's own package goes with the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ugro
from tests.integration.sharing import commands
from tests.rig.waiting import wait_until

# Without torch, which a run of ugro.train would need: what it imports and writes is the same.
SCRIPT = """\
import os, pathlib
import ugro.train, helper
from ugro.train.reporting import Metrics
rank = int(os.environ.get("RANK", 0))
if rank == 0:
    Metrics(pathlib.Path(os.environ["UGRO_OUTPUT"], "metrics.jsonl"), {}).put({"step": 1, "loss": 0.25})
print(rank, pathlib.Path(ugro.train.__file__).parts[-4:-1], helper.x)
"""
FOUND = "('ugro.zip', 'ugro', 'train')"  # the folder of its __init__.py
TRAINING = """\
import torch, ugro.train as ut
run = ut.init()
model = run.wrap(torch.nn.Linear(4, 1))
run.log(loss=0.25)
print(run.rank, "of", run.ranks, ut.__file__)
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that has nothing installed."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('ugro') is not None)"
    assert subprocess.run([str(python), "-c", code], check=False).returncode == 0
    return python


@pytest.fixture
def ugro(tmp_path: Path, python: Path) -> Iterator[Ugro]:
    """Two nodes with that Python, which find another module by a PYTHONPATH of their own."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "helper.py").write_text("x = 'helps'\n")
    nodes = [
        f"  {name}: {{transport: [sh, -c, 'exec \"$@\"', sh], remote_root: {tmp_path}/{name}, python: {python},"
        f" env: {{PYTHONPATH: '{packages}'}}}}\n"
        for name in ("n1", "n2")
    ]
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes:\n" + "".join(nodes))
    with commands(file) as ugro:
        (ugro.home / "cwd" / "train.py").write_text(SCRIPT)
        yield ugro


def metrics_of(ugro: Ugro, job: str = "last") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ugro("results", job, "--json").stdout)["job"]["results"]["metrics"] or {}
    return found


def test_a_script_that_imports_it_runs_where_nobody_installed_it(ugro: Ugro, tmp_path: Path, python: Path) -> None:
    planned = ugro("launch", "train.py", "--nodes", "2", "--dry-run")
    assert "goes with it, at the end of PYTHONPATH" in planned.stdout, planned.stderr
    assert "lack" not in planned.stdout
    done = ugro("launch", "train.py", "--nodes", "2")
    assert (done.returncode, done.stdout) == (0, f"0 {FOUND} helps\n"), done.stderr
    assert "loss" in str(metrics_of(ugro))
    single = ugro("run", "--", str(python), "train.py")
    assert (single.returncode, single.stdout) == (0, f"0 {FOUND} helps\n"), single.stderr
    wait_until(lambda: not list(tmp_path.glob("n*/.ugro/agents/*/runs/*")), 20, "it to go with its run")


@pytest.mark.proof
def test_it_comes_before_an_installed_one_and_after_the_users_own(ugro: Ugro, python: Path) -> None:
    site = subprocess.check_output(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    old = Path(site.strip(), "ugro")
    old.mkdir()
    (old / "__init__.py").write_text("raise SystemExit('an old one')\n")
    done = ugro("launch", "train.py", "--nodes", "1")
    assert (done.returncode, done.stdout) == (0, f"0 {FOUND} helps\n"), done.stderr
    here = ugro.home / "cwd"
    (here / "other.py").write_text("import ugro\nprint(ugro.mine)\n")
    (here / "ugro.py").write_text("mine = 'my own module'\n")
    for words in (("launch", "other.py"), ("run", "--", str(python), "other.py")):
        done = ugro(*words)
        assert (done.returncode, done.stdout) == (0, "my own module\n"), done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("launcher", ["ddp", "torchrun"])
def test_a_training_needs_nothing_but_torch_on_its_nodes(ugro: Ugro, python: Path, launcher: str) -> None:
    site = python.parent.parent / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for entry in os.scandir(sysconfig.get_path("purelib")):
        if "ugro" not in entry.name and not entry.name.endswith(".pth"):
            (site / entry.name).symlink_to(entry.path)
    (ugro.home / "cwd" / "train.py").write_text(TRAINING)
    done = ugro("launch", "train.py", "--nodes", "2", "--launcher", launcher, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2" in done.stdout
    assert "/sdk/ugro.zip/ugro/train" in done.stdout
    assert "loss" in str(metrics_of(ugro))
