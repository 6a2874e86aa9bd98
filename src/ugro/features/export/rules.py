"""What of a job can be said to another system, and what cannot. Values that look secret are not among it."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.model import ALL_GPUS, ANY_GPUS, Job, JobSpec, Launcher, Resources, places
from ugro.kernel.jobs.records import NODE_PYTHON
from ugro.kernel.support.errors import Unsatisfiable
from ugro.kernel.support.secrets import HIDDEN, is_secret, masked_command, without_passwords

DEFAULT_PRIORITY = 50
_DEFAULT = JobSpec("", ())
_UNCOUNTED = {ALL_GPUS: "all", ANY_GPUS: "all, or none where nodes have none"}
_SECRET = "\0"  # in place of a secret: no word of a command has it


@dataclass(frozen=True, slots=True)
class Host:
    """One of the nodes that it ran on, or would."""

    name: str  # empty if it was never placed
    processes: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the command: texts, and between each two of them a variable that holds a secret."""

    texts: tuple[str, ...]
    secrets: tuple[str, ...] = ()

    def joined(self, text: Callable[[str], str], secret: Callable[[str], str]) -> str:
        """With its parts as the target writes them."""
        between = (*map(secret, self.secrets), "")
        return "".join(text(plain) + variable for plain, variable in zip(self.texts, between, strict=True))


@dataclass(frozen=True, slots=True)
class Subject:
    job: Job
    hosts: tuple[Host, ...]
    words: tuple[Word, ...]
    env: tuple[tuple[str, str], ...]
    secrets: tuple[str, ...]  # the names of variables that have to be set
    unseen: tuple[str, ...]  # those of them whose values only the job's user sees
    setup: str | None
    version: str

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def resources(self) -> Resources:
        return _first(self.spec.resources)

    @property
    def is_training(self) -> bool:
        return self.spec.launcher is not Launcher.COMMAND

    @property
    def gpus(self) -> int:
        """On each node; of unequal nodes the most."""
        return max(len(host.gpus) for host in self.hosts)

    @property
    def processes(self) -> int:
        return max(host.processes for host in self.hosts)

    @property
    def cpus(self) -> int:
        return self.resources.cpus or 0

    @property
    def name(self) -> str:
        """In letters that every system takes, the first of the alphabet."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.spec.name.lower()).strip("-")[:40].strip("-")
        return plain if plain[:1].isalpha() else f"job-{plain or self.job.id}"

    def header(self) -> Iterator[str]:
        where = f", as placed on {places(self.job.placement)}" if self.job.placement else ""
        yield f"Job {self.job.id} ({self.spec.name}){where}. Exported by UGRO {self.version}."
        yield ""
        yield from self._code()
        yield from self._python()
        secret = [name for name in self.secrets if name not in self.unseen]
        if secret:
            yield f"Not in this file, because they look secret: {', '.join(secret)}. Set them before."
        if self.unseen:
            names = ", ".join(self.unseen)
            yield f"Not in this file, because only {self.job.user} sees their values: {names}. Set them before."
        yield "Logs, results and checkpoints stay where the job writes them."

    def unmapped(self) -> Iterator[str]:
        """What no target has a word for. Targets add their own."""
        spec, need = self.spec, self.resources
        if spec.resources.any_of:
            yield "resources.any_of: the first alternative was taken"
        if need.max_nodes > need.min_nodes:
            yield f"nodes: {need.min_nodes}..{need.max_nodes}, of which {len(self.hosts)} are taken"
        if len({(host.processes, len(host.gpus)) for host in self.hosts}) > 1:
            each = ", ".join(f"{host.name} {host.processes}" for host in self.hosts)
            yield f"unequal nodes: processes per node were {each}"
        wishes = {"labels": need.labels, "only": need.only, "gpu_model": need.gpu_models, "avoid": spec.avoid}
        for key, values in wishes.items():
            if values:
                yield f"{key}: {', '.join(values)}"
        if need.gpu_memory_bytes:
            yield f"gpu_memory: {need.gpu_memory_bytes / 1e9:g} GB"
        if self.job.placement is None and need.gpus_per_node in _UNCOUNTED:
            yield f"gpus: {_UNCOUNTED[need.gpus_per_node]}; it was never placed, and 1 on each node is taken"
        yield from self._unmapped_behaviour()

    def _unmapped_behaviour(self) -> Iterator[str]:
        spec = self.spec
        if spec.after.ok or spec.after.any:
            yield f"after: jobs {', '.join(map(str, (*spec.after.ok, *spec.after.any)))}"
        if spec.setup and self.setup is None:
            yield "setup: it holds something that looks secret"
        if spec.folders:
            yield f"folders: {', '.join(folder.name for folder in spec.folders)}"
        same = {
            "preemptible": spec.is_preemptible,
            "elastic": spec.elastic != _DEFAULT.elastic,
            "disconnect": spec.disconnect != _DEFAULT.disconnect,
            "cache": spec.is_cached,
            "notify": bool(spec.notify),
            "outputs": bool(spec.outputs),
            "checkpoint": spec.checkpoint.is_given,
        }
        yield from (key for key, is_set in same.items() if is_set)

    def _code(self) -> Iterator[str]:
        if self.spec.cwd is not None:
            yield f"It runs in {self.spec.cwd}, which has to be there on every node."
            return
        origin = self.job.origin
        commit = f", git commit {origin.commit[:12]}" if origin and origin.commit else ""
        changed = " with changes that were not committed" if origin and origin.is_dirty else ""
        tree = f" (tree {self.spec.snapshot[:12]}{commit}{changed})" if self.spec.snapshot else ""
        yield f"Code: UGRO sent a folder with the job{tree}. It is not in this file."
        yield "  Put it on a file system that every node has under the same path."

    def _python(self) -> Iterator[str]:
        if self.spec.sdk:
            yield f"Its script imports ugro: on every node, pip install ugro=={self.version}"
        wanted = self.spec.environment
        if wanted is None:
            return
        python = f" {wanted.python}" if wanted.python else ""
        if wanted.existing:
            yield f"Python: the environment {wanted.existing} of the nodes."
        elif wanted.lock:
            yield f"Python{python}: UGRO made an environment from {wanted.lock_name}."
        else:
            yield f"Python{python} with: {', '.join(map(without_passwords, wanted.requirements))}"


def subject_of(job: Job, version: str) -> Subject:
    spec = job.spec
    if spec.launcher is Launcher.RAY:
        hint = "only commands and trainings are exported; Ray has ways of its own: ray up, KubeRay"
        raise Unsatisfiable(f"job {job.id} starts a Ray cluster of its own, and cannot be exported", hint=hint)
    words = tuple(_words(spec))
    named = tuple(name for word in words for name in word.secrets)
    unseen = tuple(name for name, value in spec.env if value == HIDDEN)
    hidden = tuple(name for name, value in spec.env if name in unseen or is_secret(name, value))
    modes = {"UGRO_BALANCE": spec.balance, "UGRO_SYNC": spec.train_sync, "UGRO_NAN": spec.nan, "UGRO_SEED": spec.seed}
    env = [(name, value) for name, value in spec.env if name not in hidden]
    env += [(name, str(value)) for name, value in modes.items() if value is not None]
    setup = spec.setup if spec.setup and masked_command([spec.setup], _SECRET) == [spec.setup] else None
    return Subject(job, _hosts(job), words, tuple(env), (*hidden, *named), unseen, setup, version)


def _words(spec: JobSpec) -> Iterator[Word]:
    for number, shown in enumerate(masked_command(spec.argv, _SECRET)):
        if number == 0 and shown == NODE_PYTHON:
            yield Word(("python3",))
            continue
        texts = tuple(shown.split(_SECRET))
        first = f"UGRO_SECRET_{number}"
        names = (first if place == 1 else f"{first}_{place}" for place in range(1, len(texts)))
        yield Word(texts, tuple(names))


def _hosts(job: Job) -> tuple[Host, ...]:
    if job.placement is not None:
        shares = job.placement.shares
        return tuple(Host(node_of(share.node), len(share.gpus) or 1, share.gpus) for share in shares)
    need = _first(job.spec.resources)
    gpus = 1 if need.gpus_per_node in _UNCOUNTED else need.gpus_per_node
    return (Host("", gpus or 1, tuple(range(gpus))),) * need.min_nodes


def _first(resources: Resources) -> Resources:
    return resources.any_of[0] if resources.any_of else resources


# --- shell ------------------------------------------------------------------------------------------------------------
# What the scripts for Slurm and for torchrun have in common: lines of bash, each word quoted once.


# From Python's own launcher on; the script's words follow as "$@".
TORCHRUN = '"${UGRO_PYTHON:-python3}" -u -m torch.distributed.run'
_WIDTH = 110


def comments(subject: Subject, usage: Iterable[str], unmapped: Iterable[str]) -> Iterator[str]:
    for line in (*subject.header(), *usage):
        yield from comment(line)
    if left := [*subject.unmapped(), *unmapped]:
        yield "#"
        yield "# Not mapped, because there is no word for it here:"
        for line in left:
            yield from comment(f"  {line}")


def preparation(subject: Subject) -> Iterator[str]:
    """The folder and the variables."""
    for name in subject.secrets:
        why = "only its user sees it" if name in subject.unseen else "it looks secret"
        yield f': "${{{name}:?is not in this script, because {why}: set it before}}"'
    yield from (f"export {name}" for name in subject.secrets)
    yield from (f"export {name}={shlex.quote(value)}" for name, value in subject.env)
    yield f"cd {shlex.quote(subject.spec.cwd)}" if subject.spec.cwd else 'cd "${UGRO_CODE:-$PWD}"'


def command(words: Iterable[Word]) -> str:
    return " ".join(map(_quoted, words))


def _quoted(word: Word) -> str:
    if not word.secrets:
        return shlex.quote(word.texts[0])
    return word.joined(lambda text: shlex.quote(text) if text else "", lambda name: f'"${{{name}}}"')


def comment(line: str) -> list[str]:
    """Of one line, whatever is in it: a name must not become a line of the script."""
    plain = "".join(letter if letter.isprintable() else " " for letter in line)
    indent = " " * (len(plain) - len(plain.lstrip()))
    wrapped = textwrap.wrap(plain, _WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False) or [""]
    return [f"# {part}".rstrip() for part in wrapped]


# --- slurm ------------------------------------------------------------------------------------------------------------
# A job as an sbatch script.


_NICE = 100  # per point of priority: Slurm's own are of this size


def sbatch(subject: Subject) -> str:
    usage = ["", "Submit it in the folder of the code, or with UGRO_CODE=/path: sbatch FILE"]
    lines = [
        "#!/bin/bash",
        *comments(subject, usage, _unmapped(subject)),
        *(f"#SBATCH {option}" for option in _options(subject)),
        "",
        "set -euo pipefail",
        *preparation(subject),
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
    words = command(subject.words)
    if not subject.is_training:
        yield f"exec srun --ntasks=1 --nodes=1 {words}"
        return
    # Read to its end: a scontrol whose reader leaves early fails, and pipefail ends the script.
    first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)'
    yield f"master={first if len(subject.hosts) > 1 else '127.0.0.1'}"
    yield 'export MASTER_ADDR="${MASTER_ADDR:-$master}" MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"'
    nodes = '--nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID"'
    meeting = '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    start = f'exec {TORCHRUN} {nodes} --nproc-per-node={subject.processes} {meeting} --max-restarts=0 "$@"'
    yield f"exec srun bash -c {shlex.quote(start)} torchrun {words}"


def _unmapped(subject: Subject) -> Iterator[str]:
    spec = subject.spec
    if spec.priority > DEFAULT_PRIORITY:
        yield f"priority {spec.priority}: Slurm's operators raise a job's priority, or a QOS does"
    if spec.retry.max_retries:
        yield f"retry: {spec.retry.max_retries} times; Slurm repeats a job only when a node failed (sbatch --requeue)"


# --- torchrun ---------------------------------------------------------------------------------------------------------
# A job as a shell script that is run on each of its nodes.


_PORT = 29500


def script(subject: Subject) -> str:
    lines = [
        "#!/usr/bin/env bash",
        *comments(subject, _usage(subject), _torchrun_unmapped(subject)),
        "",
        "set -euo pipefail",
        *_place(subject),
        *preparation(subject),
        *([f"bash -euo pipefail -c {shlex.quote(subject.setup)}"] if subject.setup is not None else []),
        _start(subject),
    ]
    return "\n".join([*lines, ""])


def _usage(subject: Subject) -> Iterator[str]:
    yield ""
    if len(subject.hosts) == 1:
        yield "Run it in the folder of the code, or with UGRO_CODE=/path: bash FILE"
        return
    yield f"Run it on each of {len(subject.hosts)} nodes, in the folder of the code or with UGRO_CODE=/path:"
    yield "  bash FILE NODE_RANK MASTER_ADDR [PORT]"
    yield "MASTER_ADDR is an address of the node with NODE_RANK 0 that the others reach."


def _place(subject: Subject) -> Iterator[str]:
    if not subject.is_training:
        return
    last = len(subject.hosts) - 1
    if last:
        yield f"node_rank=${{1:?NODE_RANK, 0 to {last}}} master=${{2:?MASTER_ADDR}} port=${{3:-{_PORT}}}"
    else:
        yield f"node_rank=0 master=127.0.0.1 port=${{PORT:-{_PORT}}}"
    yield 'case "$node_rank" in'
    for rank, host in enumerate(subject.hosts):
        devices = f" export CUDA_VISIBLE_DEVICES={','.join(map(str, host.gpus))};" if host.gpus else ""
        comment = f"  # {shlex.quote(host.name)}" if host.name else ""
        yield f"  {rank}){devices} processes={host.processes} ;;{comment}"
    yield f'  *) echo "NODE_RANK is 0 to {last}, not $node_rank" >&2; exit 2 ;;'
    yield "esac"


def _start(subject: Subject) -> str:
    words = command(subject.words)
    if subject.is_training:
        nodes = f'--nnodes={len(subject.hosts)} --node-rank="$node_rank" --nproc-per-node="$processes"'
        meeting = f'--master-addr="$master" --master-port="$port" --max-restarts={subject.spec.retry.max_retries}'
        words = f"{TORCHRUN} {nodes} {meeting} {words}"
    return f"exec {_limit(subject)}{words}"


def _limit(subject: Subject) -> str:
    limit_s, stop = subject.spec.time_limit_s, subject.spec.stop
    if limit_s is None:
        return ""
    return f"timeout --signal={stop.signal} --kill-after={math.ceil(stop.grace_s)} {math.ceil(limit_s)} "


def _torchrun_unmapped(subject: Subject) -> Iterator[str]:
    spec, need = subject.spec, subject.resources
    if spec.priority != DEFAULT_PRIORITY:
        yield f"priority {spec.priority}: it starts at once"
    if need.cpus or need.memory_bytes:
        yield "cpus and memory: nothing limits them here"
    if spec.retry.max_retries and not subject.is_training:
        yield f"retry: {spec.retry.max_retries} times"
