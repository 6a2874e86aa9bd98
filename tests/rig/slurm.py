"""A Slurm of a test's own: munged, slurmctld and slurmd as processes, on ports that the system gives out."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers_jobs import start_slurm

from tests.rig.waiting import wait_until

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")


def missing() -> str:
    return ", ".join(name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None)


@dataclass(frozen=True, slots=True)
class Slurm:
    env: dict[str, str]

    def run(self, *argv: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            argv, env=self.env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, cwd: Path, *words: str) -> str:
        return self.run("sbatch", "--parsable", *words, str(script), cwd=cwd).strip()

    def state(self, job: str) -> str:
        found = self.run("scontrol", "--oneliner", "show", "job", job)
        return next(word for word in found.split() if word.startswith("JobState=")).partition("=")[2]

    def wait(self, job: str, log: Path, timeout_s: float = 180) -> str:
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in over:
            assert time.monotonic() < deadline, f"Slurm's job {job} is {state}: {log.read_text()}"
            time.sleep(0.2)
        return state


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    one = Slurm(env)
    with ExitStack() as stack:
        start_slurm(folder, env, stack)
        wait_until(lambda: "idle" in one.run("sinfo", "--noheader"), 60, "Slurm's node to be idle")
        try:
            yield one
        finally:  # before its daemons end: they would leave what runs
            one.run("scancel", "--quiet", "--user", str(os.geteuid()))
            wait_until(lambda: not one.run("squeue", "--noheader"), 60, "Slurm's jobs to end")
