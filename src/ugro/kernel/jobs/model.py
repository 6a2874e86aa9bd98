"""A job: what was submitted (``JobSpec``), its state (``JobState``), and the table of legal moves between states.

A state is where a job stands; the reason next to it is why. UNREACHABLE is not the same as dead: a node that cannot be
reached has not failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ugro.features.environments.model import EnvRequest
from ugro.kernel.access.model import account_of, node_of
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import TimedOut, UgroError
from ugro.kernel.support.moments import Instant, elapsed_s, instant_at, instant_of

if TYPE_CHECKING:
    from ugro.kernel.links.model import Machine


# --- what a job ran with ----------------------------------------------------------------------------------------------
# It ran with code of some origin, and with what was installed on its nodes.


@dataclass(frozen=True, slots=True)
class Origin:
    """The git state of the submitted code."""

    commit: str | None = None  # None: no commit yet
    is_dirty: bool = False  # tracked files were changed since
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """A node's Python environment as a job sees it; ``None`` means not installed, or not known."""

    python: str
    python_path: str
    arch: str
    packages: tuple[tuple[str, str], ...] = ()  # name and version, sorted
    torch_cuda: str | None = None
    gpu_driver: str | None = None
    node_env: str | None = None  # a hash of the node's configured variables, which may be secret
    name: str | None = None  # of the Python environment that UGRO made, or where an existing one is

    @property
    def fingerprint(self) -> str:
        import hashlib  # not at the top: most commands do not need it

        return hashlib.sha256(dumps(self).encode()).hexdigest()


# --- why an attempt failed --------------------------------------------------------------------------------------------
# A failure is a cause and a sentence. ``engine.rules.postmortem`` decides it.


class Cause(StrEnum):
    """The causes that a job's ``retry.on`` and ``retry.never_on`` may name."""

    RANK_FAILED = "rank_failed"
    OOM = "oom"
    CUDA_OOM = "cuda_oom"
    NCCL_TIMEOUT = "nccl_timeout"
    PORT_IN_USE = "port_in_use"
    DISK_FULL = "disk_full"
    IMPORT_ERROR = "import_error"
    KILLED = "killed"
    NODE_LOST = "node_lost"
    NODE_REBOOTED = "node_rebooted"
    SUPERVISOR_LOST = "supervisor_lost"
    START_FAILED = "start_failed"
    GPU_UNAVAILABLE = "gpu_unavailable"
    SETUP_FAILED = "setup_failed"
    MISMATCH = "mismatch"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank's process ended, as its node recorded it: with a code or by a signal; neither if not known."""

    rank: int
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    cause: Cause
    reason: str
    rank: int | None = None  # None: no single rank is to blame
    node: str | None = None
    exit_code: int | None = None  # 128 plus the signal's number if it was killed
    line: str | None = None  # the line of its log that explains it
    hint: str | None = None
    last_lines: tuple[str, ...] = ()  # of the culprit's log
    exits: tuple[RankExit, ...] = ()  # of all ranks whose end is known

    @property
    def exit_code_of_job(self) -> int:
        """That of the rank that failed; that of a timeout for a job that reached its time limit. Never 0."""
        return TimedOut.exit_code if self.cause is Cause.TIME_LIMIT else self.exit_code or 1


# --- folders of a job -------------------------------------------------------------------------------------------------
# A folder, or a single file, of the submitter's machine is on a job's nodes beside its code.


@dataclass(frozen=True, slots=True)
class Folder:
    """As it was when the job was submitted; its nodes get it read-only."""

    name: str
    source: str  # its path on the submitter's machine
    tree: str  # the hash of its content
    file: str = ""  # the name of the file, if it is a single one
    files: int = 0
    bytes: int = 0

    @property
    def variable(self) -> str:
        """By which its processes find it."""
        return variable_of(self.name)


def variable_of(name: str) -> str:
    return f"UGRO_FOLDER_{name.upper()}"


# --- the job and its states -------------------------------------------------------------------------------------------


ALL_NODES = 0  # of ``min_nodes`` and ``max_nodes``, until the job is submitted: as many nodes as can take it
ALL_GPUS = -1
ANY_GPUS = -2
HASH_SHOWN = 12  # letters of a hash that others see: enough to compare, too few to ask for what it names


class JobState(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    UNREACHABLE = "unreachable"
    STOPPING = "stopping"
    RECOVERING = "recovering"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


WAITING_STATES = frozenset({JobState.QUEUED, JobState.RECOVERING})
FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
# The states in which a job holds its devices: they are released only when every rank is proven dead.
HOLDING_STATES = frozenset({JobState.STARTING, JobState.RUNNING, JobState.UNREACHABLE, JobState.STOPPING})

# For each state: the states that may follow, and what the move means.
MOVES: dict[JobState, dict[JobState, str]] = {
    JobState.QUEUED: {
        JobState.STARTING: "devices were assigned",
        JobState.SUCCEEDED: "an identical job had succeeded before",
        JobState.CANCELLED: "a user cancelled it before it started",
        JobState.FAILED: "a job it waited for failed",
    },
    JobState.STARTING: {
        JobState.RUNNING: "every rank has started",
        JobState.STOPPING: "a rank did not start, or the job is to end; ranks that started are stopped",
    },
    JobState.RUNNING: {
        JobState.STOPPING: "a rank ended, a limit was reached, or the job is to end",
        JobState.UNREACHABLE: "one of its nodes is unreachable",
    },
    JobState.UNREACHABLE: {
        JobState.RUNNING: "all its nodes answer again and its ranks are alive",
        JobState.STOPPING: "a rank ended meanwhile, or the job is to end",
    },
    JobState.STOPPING: {
        JobState.SUCCEEDED: "every rank ended with 0",
        JobState.FAILED: "a rank failed and there are no retries left",
        JobState.CANCELLED: "a user cancelled it, and every rank has ended",
        JobState.RECOVERING: "every rank has ended, and the job is retried",
    },
    JobState.RECOVERING: {
        JobState.STARTING: "devices were assigned for the next attempt",
        JobState.CANCELLED: "a user cancelled it between attempts",
    },
    JobState.SUCCEEDED: {},
    JobState.FAILED: {},
    JobState.CANCELLED: {},
}


class IllegalMove(UgroError):
    """A bug: a job may only move as the table allows."""


def check_move(old: JobState, new: JobState) -> None:
    if new not in MOVES[old]:
        raise IllegalMove(f"a job cannot go from {old} to {new}")


class Ending(StrEnum):
    """Why a job that is STOPPING ends; the first reason counts."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    OWNER = "owner_is_back"  # of one of its machines: the job makes way, and is queued again


class Launcher(StrEnum):
    COMMAND = "command"  # one process, on one node
    DDP = "ddp"  # one process per device, with torchrun's environment
    TORCHRUN = "torchrun"  # PyTorch's own launcher on every node
    RAY = "ray"  # a driver on the first node, with a Ray cluster of its own on all of them


@dataclass(frozen=True, slots=True)
class Sharing:
    """Jobs of the same group may have a GPU together."""

    group: str
    most: int  # on one GPU


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job needs on each of its nodes. With ALL_GPUS the number of GPUs may differ between nodes.

    ANY_GPUS means ALL_GPUS if enough nodes of the cluster have GPUs, and otherwise no GPU on any node: ranks with and
    without GPUs cannot train together.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    gpus_per_node: int = 0  # ALL_GPUS: every free one that fits, and at least one; ANY_GPUS: see above
    gpu_memory_bytes: int | None = None
    gpu_models: tuple[str, ...] = ()  # the model's name must contain one of these
    cpus: int | None = None  # None: one for each process, if the node has that many; 0: none
    memory_bytes: int = 0
    labels: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # the names of the nodes that may be used; empty: all
    sharing: Sharing | None = None  # of one GPU on one node
    any_of: tuple[Resources, ...] = ()  # alternatives in order of preference; the fields above are then ignored


@dataclass(frozen=True, slots=True)
class Retry:
    max_retries: int = 0
    on: tuple[str, ...] = ()  # causes that are retried; empty: all but those that are sure to happen again
    never_on: tuple[str, ...] = ()
    puts_back: bool = True  # what an attempt made in its working directory is there again in the next


class OnLost(StrEnum):
    WAIT = "wait"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Disconnect:
    lost_after_s: float = 900.0
    on_lost: OnLost = OnLost.WAIT


@dataclass(frozen=True, slots=True)
class Elastic:
    """A training that goes on without ranks that are lost."""

    min_ranks: int | None = None  # None: all ranks are needed
    timeout_s: float = 300.0  # a rank that keeps the others waiting for longer is lost
    rejoins: int = 3  # how often a lost rank is started again


@dataclass(frozen=True, slots=True)
class Stop:
    signal: str = "TERM"
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class After:
    ok: tuple[int, ...] = ()  # jobs that must have succeeded
    any: tuple[int, ...] = ()  # jobs that must have ended


@dataclass(frozen=True, slots=True)
class Checkpoint:
    dir: str | None = None
    every_s: float | None = None

    @property
    def is_given(self) -> bool:
        return self.dir is not None or self.every_s is not None

    @property
    def is_inside(self) -> bool:
        """The directory is below the working directory, whose name for it is ``name``."""
        return self.dir is None or not self.dir.startswith(("/", "~"))

    @property
    def name(self) -> str:
        """Under which checkpoints are among the results."""
        return str(PurePosixPath(self.dir)) if self.dir is not None and self.is_inside else "checkpoints"


@dataclass(frozen=True, slots=True)
class ResultRule:
    """Which of a job's outputs are collected."""

    checkpoints: str = "all"  # all, none, best, or "last N"
    limit_bytes: int | None = None  # of one attempt on one node
    workdir: bool = True  # with what the job makes in its working directory, if that is a copy of UGRO's
    workdir_limit_bytes: int | None = 2_000_000_000  # of those, of one attempt on one node


@dataclass(frozen=True, slots=True)
class Imports:
    """What a script imports as it begins and neither Python nor its own code has; found without running it."""

    names: tuple[str, ...] = ()  # of modules, without what is after the first dot
    is_certain: bool = True  # False: it may also find them where we did not look


@dataclass(frozen=True, slots=True)
class JobSpec:
    name: str
    argv: tuple[str, ...]
    launcher: Launcher = Launcher.COMMAND
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    snapshot: str | None = None  # the hash of the code tree it runs in; None: no code was sent
    setup: str | None = None
    resources: Resources = field(default_factory=Resources)
    priority: int = 50  # urgent 90, normal 50, batch 10
    is_preemptible: bool = False
    time_limit_s: float | None = None
    after: After = field(default_factory=After)
    retry: Retry = field(default_factory=Retry)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    disconnect: Disconnect = field(default_factory=Disconnect)
    stop: Stop = field(default_factory=Stop)
    outputs: tuple[str, ...] = ()
    results: ResultRule = field(default_factory=ResultRule)
    seed: int | None = None
    inputs: tuple[str, ...] = ()  # files on the master whose content is part of the result cache's key
    is_cached: bool = False  # reuse the result of an identical successful job
    notify: tuple[str, ...] = ()
    balance: str | None = None  # off, static or adaptive; None: the script decides
    train_sync: str | None = None  # step or local; None: the script decides
    nan: str | None = None  # stop, skip or ignore; None: the script decides
    imports: Imports = Imports()
    sdk: bool = False  # UGRO's own package goes with it: its Python finds it, whatever the node has installed
    environment: EnvRequest | None = None  # the Python environment it runs in; None: the node's own Python
    folders: tuple[Folder, ...] = ()  # that its nodes get beside its code
    avoid: tuple[str, ...] = ()  # nodes to use only if no others are free
    elastic: Elastic = field(default_factory=Elastic)
    earlier: int | None = None  # the job that it was submitted again from, whose files it finds
    private: bool = False  # hidden from other users below operators

    @property
    def with_short_hashes(self) -> JobSpec:
        """For others than its user: who knows the whole hash of code or of a folder can have it sent to a node."""
        folders = tuple(replace(one, tree=one.tree[:HASH_SHOWN]) for one in self.folders)
        return replace(self, snapshot=self.snapshot and self.snapshot[:HASH_SHOWN], folders=folders)

    @property
    def node_imports(self) -> Imports:
        """Of its imports, what a node must have before the job comes: an environment brings its own packages."""
        if self.environment is not None:
            return Imports()
        # A set-up may install them.
        return self.imports if self.setup is None else replace(self.imports, is_certain=False)

    @property
    def has_checkpoints(self) -> bool:
        """A training may always write checkpoints; a plain command only if its spec says so."""
        return self.launcher is not Launcher.COMMAND or self.checkpoint.is_given

    @property
    def checkpoint_dir(self) -> str | None:
        """Of its working directory, if that is a copy of UGRO's; None: another place, or no checkpoints."""
        is_ours = self.has_checkpoints and self.cwd is None and self.checkpoint.is_inside
        return self.checkpoint.name if is_ours else None

    @property
    def are_checkpoints_results(self) -> bool:
        """They are not in a folder of the user's, where they stay."""
        return self.checkpoint_dir is not None or (self.has_checkpoints and self.checkpoint.dir is None)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a node that a job gets."""

    node: str  # the node, or the login there that the job was started through: see ``login``
    gpus: tuple[int, ...] = ()  # indices
    cpus: int = 0
    memory_bytes: int = 0
    # Of the node at placement: the node refuses a start after a reboot, or in another folder.
    boot_id: str | None = None
    hostname: str | None = None
    root: str | None = None
    uuids: tuple[str, ...] = ()  # of the GPUs, in the same order; empty if not known
    gpu_group: str = ""  # whose jobs may have the GPU, too; empty: nobody else

    def is_of(self, machine: Machine) -> bool:
        """False if the node's name now leads to another machine or folder."""
        if self.root is None:
            return True
        return self.root == machine.root and (self.boot_id == machine.boot_id or self.hostname == machine.hostname)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes and devices an attempt was given, in rank order."""

    shares: tuple[Share, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes or logins through which it is reached."""
        return tuple([share.node for share in self.shares])  # asked for all the time

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes themselves, whose devices it has."""
        return tuple(node_of(share.node) for share in self.shares)

    def on(self, node: str) -> Share:
        return next(share for share in self.shares if share.node == node)


@dataclass(frozen=True, slots=True)
class Tries:
    """How often a job was tried, and what the next attempt must respect."""

    charged: int = 0  # retries used of those that its submitter allowed
    free: int = 0  # retries that do not count, because machines failed and not the program
    not_before: float | None = None  # the end of the pause, in seconds since the epoch
    avoid: tuple[str, ...] = ()  # nodes to use only if no others are free
    pause_s: float | None = None
    pause_boot: str = ""  # the boot and its clock when the pause began

    @property
    def pause(self) -> tuple[Instant, float] | None:
        """When the pause before the next attempt began, and its length."""
        if self.not_before is None:
            return None
        length_s = self.pause_s or 0.0
        return instant_at(self.not_before - length_s, self.pause_boot), length_s


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a job: where it ran, and how it ended."""

    number: int
    placement: Placement
    started_at: str
    ended_at: str | None = None
    outcome: str | None = None  # the reason its job moved on
    failure: Failure | None = None
    # The boot and its clock at these times: a wall clock that is set changes no duration.
    started_boot: str | None = None
    ended_boot: str | None = None

    @property
    def started(self) -> Instant:
        return instant_of(self.started_at, self.started_boot)

    def lasts_s(self, now: Instant) -> float:
        end = instant_of(self.ended_at, self.ended_boot) if self.ended_at else now
        return elapsed_s(self.started, end)


@dataclass(frozen=True, slots=True)
class Job:
    id: int
    spec: JobSpec
    user: str
    state: JobState
    reason: str
    submitted_at: str
    attempt: int = 0
    placement: Placement | None = None
    started_at: str | None = None  # the first attempt
    attempt_started_at: str | None = None  # the current one
    ended_at: str | None = None
    exit_code: int | None = None
    ending: Ending | None = None  # why it is to stop; the first decision counts
    tries: Tries = field(default_factory=Tries)
    origin: Origin | None = None
    cached_from: int | None = None  # not run: that job had done the same before
    results_removed_at: str | None = None
    # The boot and its clock at these times.
    submitted_boot: str | None = None
    started_boot: str | None = None
    attempt_started_boot: str | None = None
    ended_boot: str | None = None
    submit_key: str = ""  # that its client chose: the same key is the same job

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def held(self) -> Placement | None:
        """What it holds now. Between attempts that is nothing, and ``placement`` still has the last one."""
        return self.placement if self.state in HOLDING_STATES else None

    def is_apart_from(self, user: str) -> bool:
        """Whether it ran in an account of its own user's, who is somebody else."""
        return self.user != user and self.placement is not None and any(map(account_of, self.placement.nodes))

    @property
    def submitted(self) -> Instant:
        return instant_of(self.submitted_at, self.submitted_boot)

    @property
    def started(self) -> Instant | None:
        """Its first attempt."""
        return instant_of(self.started_at, self.started_boot) if self.started_at else None

    @property
    def attempt_started(self) -> Instant | None:
        return instant_of(self.attempt_started_at, self.attempt_started_boot) if self.attempt_started_at else None

    @property
    def ended(self) -> Instant | None:
        return instant_of(self.ended_at, self.ended_boot) if self.ended_at else None

    def lasts_s(self, now: Instant) -> float:
        """How long it has waited or run."""
        begin = self.submitted if self.state in WAITING_STATES else self.started or self.submitted
        return elapsed_s(begin, self.ended or now)


def holders(jobs: Iterable[Job], node: str, gpu: int | None) -> list[Job]:
    """The jobs that hold a GPU of a node now; None: those that are on the node and hold none of its GPUs."""
    shares = ((job, share) for job in jobs if job.held for share in job.held.shares if node_of(share.node) == node)
    return [job for job, share in shares if (gpu in share.gpus if gpu is not None else not share.gpus)]


def places(placement: Placement | None) -> str:
    """``gpu1 GPU 0–1, gpu2``"""
    shares = placement.shares if placement else ()
    return ", ".join(node_of(share.node) + (f" GPU {ranges(share.gpus)}" if share.gpus else "") for share in shares)


def ranges(numbers: Iterable[int]) -> str:
    """``0–7, 9``"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
