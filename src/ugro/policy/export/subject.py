"""What of a job can be said to another system, and what cannot. Values that look secret are not among it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ugro.core.errors import Unsatisfiable
from ugro.core.job import ALL_GPUS, ANY_GPUS, Job, JobSpec, Launcher, Resources, places
from ugro.core.login import node_of
from ugro.core.plan import NODE_PYTHON
from ugro.core.support.secret import HIDDEN, is_secret, masked_command, without_passwords

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
