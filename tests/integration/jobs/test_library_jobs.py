"""A job whose script leaves the loop to the Hugging Face Trainer: it survives a killed rank."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Farms, Ugro
from tests.rig import ranks
from tests.rig.waiting import wait_until

_LIMIT_S = 250
_NODES = 2
# The example as it is, but for a rank that is killed in the second epoch.
_SCRIPT = """
import os, signal
import hf_trainer
from transformers import TrainerCallback

class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if os.environ["UGRO_ATTEMPT"] == "1" and os.environ["RANK"] == "1" and state.global_step == 10:
            os.kill(os.getpid(), signal.SIGKILL)

class Trainer(hf_trainer.Trainer):
    def __init__(self, *others, **more):
        super().__init__(*others, callbacks=[Dies()], **more)

hf_trainer.Trainer = Trainer
hf_trainer.main()
"""


@pytest.fixture
def nodes(ugro: Ugro, farm_of: Farms) -> None:
    """Sshds, with a Python that has the libraries."""
    farm = farm_of(_NODES)
    ugro.cluster = farm.cluster_yaml(nodes={node.name: {"python": sys.executable} for node in farm.nodes})


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nodes")
@pytest.mark.skipif(find_spec("accelerate") is None, reason="the libraries are not installed")
def test_a_job_with_the_trainer_recovers_by_itself_and_has_a_loss(ugro: Ugro) -> None:
    project = ugro.home / "project"
    project.mkdir()
    shutil.copy(ranks.ROOT / "examples" / "hf_trainer.py", project)
    (project / "train.py").write_text(_SCRIPT)
    words = ("--nodes", str(_NODES), "--balance", "static", "-e", "UGRO_SPEEDS=1,0.5")
    launched = ugro("launch", "--detach", "--json", *words, str(project / "train.py"), "--", "--tiny", "--epochs", "2")
    assert launched.returncode == 0, launched.stderr
    job = str(json.loads(launched.stdout)["job"]["id"])
    ended = ugro("wait", job, timeout=_LIMIT_S)
    assert ended.returncode == 0, ugro("status", job).stdout + ugro("logs", job).stdout[-3000:]

    def results() -> Any:
        return json.loads(ugro("results", job, "--json").stdout)["job"]["results"]

    wait_until(lambda: (results().get("metrics") or {}).get("final_loss") is not None, 60, "its loss")
    (attempt,) = Path(results()["folder"]).glob("attempt_2")
    records = attempt / "output" / "metrics.jsonl"
    steps = ranks.metrics(records, "profile")
    assert [step["step"] for step in steps] == list(range(7, 14)), "resumed after the first epoch, of seven steps"
    assert all(step["shares"][0] > step["shares"][1] for step in steps[:-1])
    assert [record["values"]["loss"] for record in ranks.metrics(records, "log") if "loss" in record["values"]]
