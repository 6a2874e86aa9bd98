"""How fast other queues run many small jobs on this machine: HyperQueue, Slurm, task-spooler.

Every job's output must arrive in a file of its own, and is checked. A peer is done when the last of these files was
written, although it may know so only later: the time its own waiting takes is not held against it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.rig.waiting import wait_until

SLOTS = 64  # more than two cores can use: a queue should not wait for one job to be written down as ended
CLOCK = ("date", "+%s.%N")  # printed by a job when it starts
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to submit jobs to a queue. The folder receives their outputs and nothing else."""

    name: str
    submit: Callable[[Sequence[Sequence[str]], Path], None]
    settle: Callable[[], None]  # until the queue itself knows that nothing is left

    def run(self, count: int, folder: Path) -> float:
        """Seconds from the first submit to the last output of ``count`` jobs, each of which prints its number."""
        started = time.time()
        self.submit([("echo", str(number)) for number in range(count)], folder)
        wait_until(lambda: _written(folder) >= count, _LIMIT_S, f"{count} outputs of {self.name}")
        ended = max(entry.stat().st_mtime for entry in os.scandir(folder))
        check(self.name, count, [Path(entry).read_text() for entry in os.scandir(folder)])
        self.settle()
        return ended - started

    def start_one(self, folder: Path) -> float:
        """Seconds from the submit of one job to its start."""
        started = time.time()
        self.submit([CLOCK], folder)
        wait_until(lambda: _written(folder) >= 1, _LIMIT_S, f"the output of {self.name}")
        began = float(next(folder.iterdir()).read_text())
        self.settle()
        return began - started


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    missing: str  # what is not installed, if anything
    open: Callable[[Path], AbstractContextManager[list[Way]]]


def peers() -> list[Peer]:
    return [
        Peer("HyperQueue", "" if find_spec("hyperqueue") else "the Python package hyperqueue", _hyperqueue),
        Peer("Slurm", _missing("munged", "slurmctld", "slurmd", "sbatch", "squeue"), _slurm),
        Peer("task-spooler", _missing("tsp"), _task_spooler),
    ]


def check(name: str, count: int, outputs: Sequence[str]) -> None:
    if sorted(outputs) != sorted(f"{number}\n" for number in range(count)):
        raise RuntimeError(f"{name}: {len(outputs)} outputs of {count} jobs, or wrong ones")


# --- HyperQueue: its Python package holds server, worker and client, but no way to ask for a journal -----------------


@contextmanager
def _hyperqueue(folder: Path) -> Iterator[list[Way]]:
    from hyperqueue import Job
    from hyperqueue.cluster import LocalCluster, WorkerConfig

    with _stdout_to_stderr():  # it prints a table when it starts
        cluster = LocalCluster(server_dir=str(folder / "server"), worker_config=WorkerConfig(cores=SLOTS))
    client = cluster.client()
    submitted: list[int] = []

    def one_by_one(commands: Sequence[Sequence[str]], outputs: Path) -> None:
        for number, command in enumerate(commands):
            job = Job(default_workdir=folder)
            job.program(list(command), stdout=str(outputs / str(number)), stderr=None)
            submitted.append(client.submit(job).id)

    def together(commands: Sequence[Sequence[str]], outputs: Path) -> None:
        job = Job(default_workdir=folder)
        for number, command in enumerate(commands):
            job.program(list(command), stdout=str(outputs / str(number)), stderr=None)
        submitted.append(client.submit(job).id)

    def settle() -> None:
        failed = client.connection.wait_for_jobs(tuple(submitted), lambda jobs: None)
        submitted.clear()
        if failed:
            raise RuntimeError(f"HyperQueue: jobs {failed} failed")

    try:
        yield [
            Way("HyperQueue, one job each (not durable)", one_by_one, settle),
            Way("HyperQueue, tasks of one job (not durable)", together, settle),
        ]
    finally:
        cluster.stop()


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


# --- Slurm: a controller and a node's daemon, with its state on disk --------------------------------------------------


@contextmanager
def _slurm(folder: Path) -> Iterator[list[Way]]:
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def ask(*argv: str) -> str:
        return _output_of(argv, environment)

    def one_by_one(commands: Sequence[Sequence[str]], outputs: Path) -> None:
        for number, command in enumerate(commands):
            ask("sbatch", "--quiet", "--output", str(outputs / str(number)), "--wrap", " ".join(command))

    def together(commands: Sequence[Sequence[str]], outputs: Path) -> None:
        assert commands[0][0] == "echo"  # an array runs one script; all that differs is its number
        script = "echo $SLURM_ARRAY_TASK_ID"
        indices = f"0-{len(commands) - 1}"
        ask("sbatch", "--quiet", "--array", indices, "--output", str(outputs / "%a"), "--wrap", script)

    def settle() -> None:
        wait_until(lambda: not ask("squeue", "--noheader"), _LIMIT_S, "Slurm's queue to be empty")

    with ExitStack() as stack:
        start_slurm(folder, environment, stack)
        wait_until(lambda: "idle" in ask("sinfo", "--noheader"), 60, "Slurm's node to be idle")
        yield [Way("Slurm, one sbatch each", one_by_one, settle), Way("Slurm, one array", together, settle)]


def start_slurm(folder: Path, environment: dict[str, str], stack: ExitStack) -> None:
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge/key").write_bytes(os.urandom(1024))
    (folder / "munge/key").chmod(0o600)
    (folder / "slurm.conf").write_text(_slurm_conf(folder))
    files = [f"--{name}-file={folder / 'munge' / name}" for name in ("key", "pid", "log", "seed")]
    munged = ["munged", "--foreground", "--force", f"--socket={folder / 'munge/socket'}", *files]
    stack.enter_context(_daemon(munged, environment, folder / "munged.out"))
    wait_until((folder / "munge/socket").exists, 10, "munged to listen")
    stack.enter_context(_daemon(["slurmctld", "-D"], environment, folder / "slurmctld.out"))
    stack.enter_context(_daemon(["slurmd", "-D", "-N", "bench"], environment, folder / "slurmd.out"))


def _slurm_conf(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    user = "root" if os.geteuid() == 0 else os.environ.get("USER", "root")
    return f"""\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
MaxJobCount=20000
MaxArraySize=20000
SlurmdParameters=config_overrides
NodeName=bench NodeHostname={host} NodeAddr=127.0.0.1 CPUs={SLOTS}
PartitionName=bench Nodes=bench Default=YES
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _daemon(argv: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    program = shutil.which(argv[0], path=_PATH) or argv[0]
    with log.open("wb") as output:
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(
            [program, *argv[1:]], env=environment, stdin=nowhere, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


# --- task-spooler: one process per submit, which stays to run the job -------------------------------------------------


@contextmanager
def _task_spooler(folder: Path) -> Iterator[list[Way]]:
    environment = {
        **os.environ,
        "TS_SOCKET": str(folder / "socket"),
        "TS_MAXFINISHED": "20000",
        "TS_SAVELIST": str(folder / "saved"),  # as durable as it gets: the list is saved when its server is ended
    }

    def ask(*argv: str, outputs: Path = folder) -> str:
        return _output_of(("tsp", *argv), {**environment, "TMPDIR": str(outputs)})

    def one_by_one(commands: Sequence[Sequence[str]], outputs: Path) -> None:
        for command in commands:
            ask(*command, outputs=outputs)

    def settle() -> None:
        wait_until(lambda: not re.search(r"^\d+ +(queued|running)", ask(), re.M), _LIMIT_S, "task-spooler to end")
        ask("-C")

    ask("-S", str(SLOTS))
    try:
        yield [Way("task-spooler, one tsp each (not durable)", one_by_one, settle)]
    finally:
        ask("-K")


def _missing(*programs: str) -> str:
    return ", ".join(name for name in programs if shutil.which(name, path=_PATH) is None)


def _written(folder: Path) -> int:
    return sum(entry.stat().st_size > 0 for entry in os.scandir(folder))


def _output_of(argv: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
