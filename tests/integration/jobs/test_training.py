"""A real DDP training over real sshds ends with the loss of one process alone, also when a rank is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig.waiting import processes_with_variable, wait_until

_SCRIPT = Path(__file__).parents[3] / "examples" / "train_ddp.py"
_NODES = 3
_EPOCHS = 4
_LIMIT_S = 150


def loss_alone(epochs: int) -> str:
    """One process, without UGRO: the same samples in the same order."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), "--epochs", str(epochs)],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=True,
    )
    return _final_loss(done.stdout)


@pytest.fixture
def nodes(ugro: Ugro, farm_of: Farms) -> None:
    """Three sshds, with a Python that has PyTorch."""
    farm = farm_of(_NODES)
    ugro.cluster = farm.cluster_yaml(nodes={node.name: {"python": sys.executable} for node in farm.nodes})


@pytest.mark.proof  # the README's test has a training on three nodes
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("count", [2, _NODES])
def test_a_launch_on_several_nodes_ends_with_the_loss_of_one_process(ugro: Ugro, count: int) -> None:
    done = ugro("launch", "--nodes", str(count), str(_SCRIPT), "--", "--epochs", "1", timeout=_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _final_loss(done.stdout) == loss_alone(1)


@pytest.mark.proof
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("nodes")
def test_a_killed_rank_costs_an_epoch_at_most_and_nothing_of_the_result(ugro: Ugro) -> None:
    launched = ugro(
        *("launch", "--detach", "--json", "--nodes", str(_NODES), str(_SCRIPT)),
        *("--", "--epochs", str(_EPOCHS), "--pause", "0.02"),
    )
    assert launched.returncode == 0, launched.stderr
    job = str(json.loads(launched.stdout)["job"]["id"])

    wait_until(lambda: "epoch 2 step 5" in ugro("logs", job, "--rank", "0").stdout, _LIMIT_S, "the third epoch")
    os.kill(_rank(job, _NODES - 1), signal.SIGKILL)

    ended = ugro("wait", job, "--json", timeout=_LIMIT_S)
    assert ended.returncode == 0, ugro("status", job).stdout + ugro("logs", job).stdout[-3000:]
    attempts = _attempts(ugro, job)
    assert len(attempts) == 2, ugro("status", job).stdout
    first, second = attempts
    assert first["failure"]["cause"] == "killed"
    assert (first["failure"]["rank"], second["failure"]) == (_NODES - 1, None)
    log = ugro("logs", job, "--rank", "0").stdout
    resumed = re.search(r"resumed after epoch (\d)", log)
    assert resumed is not None, log
    assert int(resumed[1]) >= 1
    assert _final_loss(log) == loss_alone(_EPOCHS)


def _rank(job: str, rank: int) -> int:
    ours = set(processes_with_variable("UGRO_JOB", [job])) & set(processes_with_variable("RANK", [str(rank)]))
    (pid,) = (pid for pid in ours if _SCRIPT.name in Path(f"/proc/{pid}/cmdline").read_text())
    return pid


def _attempts(ugro: Ugro, job: str) -> list[dict[str, Any]]:
    document = json.loads(ugro("status", job, "--json").stdout)
    return list(document["job"]["attempts"])


def _final_loss(output: str) -> str:
    found = re.search(r"final loss (\S+)", output)
    assert found is not None, output[-2000:]
    return found[1]
