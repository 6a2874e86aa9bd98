"""`ugro export`: the script for torchrun on two nodes, and the sbatch script on a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import InProcess, Ugro
from tests.rig import slurm as rig
from tests.rig.ports import free_port

TRAINING = """\
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item(), sys.argv[1:], os.environ["EPOCHS"])
dist.destroy_process_group()
"""


def submitted(ugro: Ugro, *words: str) -> int:
    done = ugro("launch", "--json", "--detach", *words)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["job"]["id"])


def exported(ugro: Ugro, job: int, target: str) -> Path:
    file = ugro.home / "cwd" / f"{target}.sh"
    done = ugro("export", str(job), "--to", target, "-o", str(file))
    assert done.returncode == 0, done.stderr
    return file


@pytest.fixture
def code(ugro: Ugro) -> Path:
    folder = ugro.home / "cwd"
    (folder / "train.py").write_text(TRAINING)
    return folder


def test_a_job_is_written_for_each_system(ugro: Ugro) -> None:
    assert ugro("run", "--name", "hello", "--env", "API_TOKEN=topsecret", "--", "echo", "it's me").returncode == 0
    ugro = InProcess(ugro.home)
    for target, part in (("slurm", "#SBATCH --nodes=1"), ("kubernetes", "kind: JobSet"), ("torchrun", "exec echo")):
        done = ugro("export", "last", "--to", target)
        assert done.returncode == 0, done.stderr
        assert part in done.stdout
        assert "API_TOKEN" in done.stdout
        assert "topsecret" not in done.stdout
    document = json.loads(ugro("export", "last", "--to", "torchrun", "--json").stdout)
    assert document["export"]["target"] == "torchrun"
    file = exported(ugro, 1, "torchrun")
    ran = subprocess.run(["bash", str(file)], env={**os.environ, "API_TOKEN": "x"}, capture_output=True, text=True)
    assert ran.stdout == "it's me\n"
    mistakes_are_said(ugro)


def mistakes_are_said(ugro: Ugro) -> None:
    file = ugro.home / "cwd" / "there"
    file.write_text("mine")
    for words, code, said in (
        (["last", "--to", "pbs"], 2, "slurm"),
        (["99", "--to", "slurm"], 4, "99"),
        (["last", "--to", "slurm", "-o", str(file)], 6, "exists"),
        (["last", "--to", "slurm", "-o", "/no/such/folder/x"], 1, "cannot be written"),
    ):
        done = ugro("export", *words)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert file.read_text() == "mine"


@pytest.mark.proof
def test_the_torchrun_script_trains_on_two_nodes(ugro: Ugro, code: Path) -> None:
    ugro.cluster = code / "two.yaml"
    nodes = [f"  {name}: {{transport: local, remote_root: {ugro.home}/{name}}}" for name in ("n1", "n2")]
    ugro.cluster.write_text("\n".join(["nodes:", *nodes, ""]))
    job = submitted(ugro, "--nodes", "2", "--env", "EPOCHS=3", "train.py", "--note", "it's $HOME")
    file = exported(ugro, job, "torchrun")
    env = {**os.environ, "UGRO_PYTHON": sys.executable}
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            ["bash", str(file), str(rank), "127.0.0.1", port],
            env=env, cwd=code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for number, (said, _) in enumerate(outputs):
        assert f"rank {number} of 2 sum 3.0 ['--note', \"it's $HOME\"] 3" in said
    wrong = subprocess.run(["bash", str(file), "2", "127.0.0.1"], env=env, capture_output=True, text=True)
    assert (wrong.returncode, "NODE_RANK is 0 to 1, not 2" in wrong.stderr) == (2, True)


@pytest.mark.proof
@pytest.mark.skipif(bool(rig.missing()), reason=f"Slurm is not installed (Debian: slurm-wlm, munge): {rig.missing()}")
def test_the_sbatch_script_runs_on_slurm(ugro: Ugro, code: Path, tmp_path: Path) -> None:
    words = ("--time-limit", "10m", "--priority", "batch", "--env", "EPOCHS=3", "--env", "MY_TOKEN=topsecret")
    training = submitted(ugro, "--name", "train", *words, "train.py", "--note", "it's $HOME")
    script = exported(ugro, training, "slurm")
    assert ugro("wait", str(training), timeout=120).returncode in (0, 1)
    env = {"UGRO_PYTHON": sys.executable, "MY_TOKEN": "given", "MASTER_PORT": str(free_port())}
    with rig.slurm(tmp_path) as slurm:
        slurm.env.update(env)
        job = slurm.submit(script, code)
        state = slurm.wait(job, code / f"train-{job}.log")
        log = (code / f"train-{job}.log").read_text()
        assert state == "COMPLETED", log
        assert "rank 0 of 1 sum 1.0 ['--note', \"it's $HOME\"] 3" in log
        shown = slurm.run("scontrol", "--oneliner", "show", "job", job)
        assert "TimeLimit=00:10:00" in shown
        assert "Nice=4000" in shown
        del slurm.env["MY_TOKEN"]
        refused = slurm.submit(script, code)
        log_of_refused = code / f"train-{refused}.log"
        assert slurm.wait(refused, log_of_refused) == "FAILED"
        assert "MY_TOKEN: is not in this script" in log_of_refused.read_text()
