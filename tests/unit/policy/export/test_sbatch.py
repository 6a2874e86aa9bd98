"""The sbatch script as bash runs it, on one node and on several: Slurm's own programs and torchrun stand in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.policy.export.test_export import TRAINING, job_of
from ugro.features.export.client import export
from ugro.kernel.jobs.model import JobSpec, Placement, Resources, Share

# Slurm starts what follows once on each node of the job, and tells it which one that is.
SRUN = """\
#!/bin/bash
nodes=$SLURM_JOB_NUM_NODES
while [[ $1 == --* ]]; do
  [[ $1 == --nodes=* ]] && nodes=${1#--nodes=}
  shift
done
for ((node = 0; node < nodes; node++)); do
  SLURM_NODEID=$node SLURM_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-1} "$@" || exit
done
"""
# The first node is on the first line. There may be any number of others.
SCONTROL = """\
#!/bin/bash
[[ "$*" == "show hostnames gpu[7-99999]" ]] || exit 64
seq -f gpu%g 7 99999
"""
# Torch's launcher as far as the script needs it: so many ranks, each with its variables.
TORCHRUN = """\
import argparse, os, subprocess, sys
options = argparse.ArgumentParser(allow_abbrev=False)
for name in ("nnodes", "node-rank", "nproc-per-node", "master-port", "max-restarts"):
    options.add_argument(f"--{name}", type=int, required=True)
options.add_argument("--master-addr", required=True)
options.add_argument("words", nargs=argparse.REMAINDER)
given = options.parse_args()
for local in range(given.nproc_per_node):
    rank, world = given.node_rank * given.nproc_per_node + local, given.nnodes * given.nproc_per_node
    meeting = {"MASTER_ADDR": given.master_addr, "MASTER_PORT": str(given.master_port)}
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), **meeting}
    subprocess.run([sys.executable, *given.words], env=env, check=True)
"""
RANK = """\
import json, os, sys
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ODD", "HF_TOKEN")
print(json.dumps([[os.environ[name] for name in names], sys.argv[1:]]))
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    programs, launcher = tmp_path / "bin", tmp_path / "packages" / "torch" / "distributed"
    for folder in (programs, launcher):
        folder.mkdir(parents=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for package in (launcher, launcher.parent):
        (package / "__init__.py").touch()
    (launcher / "run.py").write_text(TORCHRUN)
    (tmp_path / "train.py").write_text(RANK)
    return tmp_path


def run(code: Path, spec: JobSpec, nodes: int, **env: str) -> subprocess.CompletedProcess[str]:
    """As Slurm runs it on the first node of a job."""
    placement = Placement(tuple(Share(f"n{number}", (0, 1)) for number in range(nodes)))
    script = code / "job.sh"
    script.write_text(export(job_of(spec, placement), "slurm"))
    given = {
        "PATH": f"{code / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(code / "packages"),
        "UGRO_PYTHON": sys.executable,
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "gpu[7-99999]",
        "HF_TOKEN": "given",
        "DB": "given",
        **env,
    }
    return subprocess.run(["bash", str(script)], env=given, cwd=code, capture_output=True, text=True, timeout=60)


def ranks(output: str) -> Iterator[tuple[list[str], list[str]]]:
    for line in output.splitlines():
        if line.startswith("["):
            variables, words = json.loads(line)
            yield variables, words


@pytest.mark.parametrize(("nodes", "first"), [(1, "127.0.0.1"), (3, "gpu7")])
def test_every_rank_of_every_node_knows_its_number_and_where_the_first_is(code: Path, nodes: int, first: str) -> None:
    done = run(code, replace(TRAINING, setup="echo set up on $SLURM_NODEID"), nodes)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if "set up" in line] == [f"set up on {n}" for n in range(nodes)]
    world = str(2 * nodes)
    words = list(TRAINING.argv[1:])
    assert list(ranks(done.stdout)) == [
        ([str(rank), world, first, "23456", "a'b $c", "given"], words) for rank in range(2 * nodes)
    ]


def test_an_address_that_the_site_gives_wins(code: Path) -> None:
    done = run(code, replace(TRAINING, setup=None), 2, MASTER_ADDR="ib-gpu7", MASTER_PORT="29500")
    assert {(variables[2], variables[3]) for variables, _ in ranks(done.stdout)} == {("ib-gpu7", "29500")}


def test_a_list_of_nodes_that_slurm_does_not_give_ends_the_job(code: Path) -> None:
    done = run(code, replace(TRAINING, setup=None), 2, SLURM_JOB_NODELIST="nonsense")
    assert (done.returncode, list(ranks(done.stdout))) == (64, [])


def test_a_setup_that_fails_ends_the_job_before_a_rank_starts(code: Path) -> None:
    done = run(code, replace(TRAINING, setup="exit 3"), 2)
    assert (done.returncode, list(ranks(done.stdout))) == (3, [])


@pytest.mark.parametrize(("cpus", "given"), [(8, "8"), (None, "1")])
def test_a_step_gets_the_cpus_of_the_job(code: Path, cpus: int | None, given: str) -> None:
    """Slurm gives a step one CPU unless it is told otherwise, whatever the job has."""
    spec = JobSpec("cpus", ("printenv", "SLURM_CPUS_PER_TASK"), resources=Resources(cpus=cpus))
    done = run(code, spec, 1)
    assert (done.stdout, done.stderr) == (f"{given}\n", "")


def test_a_plain_command_runs_once(code: Path) -> None:
    spec = JobSpec("echo", ("printf", "%s|", "it's", "$HOME", "a\nb"))
    done = run(code, spec, 1, SLURM_JOB_NUM_NODES="2")
    assert (done.stdout, done.stderr) == ("it's|$HOME|a\nb|", "")
