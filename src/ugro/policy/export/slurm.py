"""A job as an sbatch script."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from ugro.policy.export import shell
from ugro.policy.export.subject import DEFAULT_PRIORITY, Subject

_NICE = 100  # per point of priority: Slurm's own are of this size


def sbatch(subject: Subject) -> str:
    usage = ["", "Submit it in the folder of the code, or with UGRO_CODE=/path: sbatch FILE"]
    lines = [
        "#!/bin/bash",
        *shell.comments(subject, usage, _unmapped(subject)),
        *(f"#SBATCH {option}" for option in _options(subject)),
        "",
        "set -euo pipefail",
        *shell.preparation(subject),
        # Since Slurm 22.05 srun does not take them from the options of the job.
        *([f"export SRUN_CPUS_PER_TASK={subject.cpus}"] if subject.cpus else []),
        *_steps(subject),
    ]
    return "\n".join([*lines, ""])


def _options(subject: Subject) -> Iterator[str]:
    spec, memory = subject.spec, subject.resources.memory_bytes
    yield f"--job-name={subject.name}"
    yield f"--nodes={len(subject.hosts)}"
    yield "--ntasks-per-node=1"
    if subject.gpus:
        yield f"--gpus-per-node={subject.gpus}"
    if subject.cpus:
        yield f"--cpus-per-task={subject.cpus}"
    if memory:
        yield f"--mem={math.ceil(memory / 2**20)}M"
    if spec.time_limit_s is not None:
        yield f"--time={max(1, math.ceil(spec.time_limit_s / 60))}"
        yield f"--signal={spec.stop.signal}@{max(1, min(65535, round(spec.stop.grace_s)))}"
    if spec.priority < DEFAULT_PRIORITY:
        yield f"--nice={(DEFAULT_PRIORITY - spec.priority) * _NICE}"
    yield f"--output={subject.name}-%j.log"


def _steps(subject: Subject) -> Iterator[str]:
    if subject.setup is not None:
        yield f"srun bash -euo pipefail -c {shlex.quote(subject.setup)}"
    words = shell.command(subject.words)
    if not subject.is_training:
        yield f"exec srun --ntasks=1 --nodes=1 {words}"
        return
    # Read to its end: a scontrol whose reader leaves early fails, and pipefail ends the script.
    first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)'
    yield f"master={first if len(subject.hosts) > 1 else '127.0.0.1'}"
    yield 'export MASTER_ADDR="${MASTER_ADDR:-$master}" MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"'
    nodes = '--nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID"'
    meeting = '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    start = f'exec {shell.TORCHRUN} {nodes} --nproc-per-node={subject.processes} {meeting} --max-restarts=0 "$@"'
    yield f"exec srun bash -c {shlex.quote(start)} torchrun {words}"


def _unmapped(subject: Subject) -> Iterator[str]:
    spec = subject.spec
    if spec.priority > DEFAULT_PRIORITY:
        yield f"priority {spec.priority}: Slurm's operators raise a job's priority, or a QOS does"
    if spec.retry.max_retries:
        yield f"retry: {spec.retry.max_retries} times; Slurm repeats a job only when a node failed (sbatch --requeue)"
