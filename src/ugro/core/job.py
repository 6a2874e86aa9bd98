"""A job: what was submitted (``JobSpec``), where it stands (``JobState``), and the table of legal moves between states.

A state says where a job is; the reason beside it says why. UNREACHABLE is kept apart from dead: a node that cannot be
asked has not failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from ugro.core.environment import Origin
from ugro.core.errors import UgroError
from ugro.core.failure import Failure

if TYPE_CHECKING:
    from ugro.core.node import Machine

ALL_GPUS = -1
ANY_GPUS = -2


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
# The states in which a job holds its devices: released only when every rank is proven dead.
HOLDING_STATES = frozenset({JobState.STARTING, JobState.RUNNING, JobState.UNREACHABLE, JobState.STOPPING})

# From each state: where it may go, and what that move means.
MOVES: dict[JobState, dict[JobState, str]] = {
    JobState.QUEUED: {
        JobState.STARTING: "it was given its devices",
        JobState.SUCCEEDED: "the same had been done before, and it may point to that",
        JobState.CANCELLED: "a user cancelled it before it started",
        JobState.FAILED: "a job it waited for failed",
    },
    JobState.STARTING: {
        JobState.RUNNING: "every rank has started",
        JobState.STOPPING: "a rank did not start, or it is to end; what started is taken back",
    },
    JobState.RUNNING: {
        JobState.STOPPING: "a rank ended, a limit was reached, or it is to end",
        JobState.UNREACHABLE: "a node of it cannot be asked",
    },
    JobState.UNREACHABLE: {
        JobState.RUNNING: "all its nodes answer again and its ranks live",
        JobState.STOPPING: "a rank ended meanwhile, or it is to end",
    },
    JobState.STOPPING: {
        JobState.SUCCEEDED: "every rank ended with 0",
        JobState.FAILED: "a rank failed and there are no retries left",
        JobState.CANCELLED: "a user cancelled it, and every rank has ended",
        JobState.RECOVERING: "every rank has ended, and it is to be tried again",
    },
    JobState.RECOVERING: {
        JobState.STARTING: "it was given its devices for the next attempt",
        JobState.CANCELLED: "a user cancelled it between attempts",
    },
    JobState.SUCCEEDED: {},
    JobState.FAILED: {},
    JobState.CANCELLED: {},
}


class IllegalMove(UgroError):
    """A bug of ours: nothing moves a job but by the table."""


def check_move(old: JobState, new: JobState) -> None:
    if new not in MOVES[old]:
        raise IllegalMove(f"a job cannot go from {old} to {new}")


class Ending(StrEnum):
    """Why a job that is STOPPING ends; the first reason holds."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"


class Launcher(StrEnum):
    COMMAND = "command"  # one process, on one node
    DDP = "ddp"  # one process per device, with torchrun's environment
    TORCHRUN = "torchrun"  # PyTorch's own launcher on every node


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job needs. Every node of it gets the same demands; the number of GPUs may still differ with ALL_GPUS.

    ANY_GPUS is ALL_GPUS where enough nodes of the cluster have some, and otherwise none on any node: ranks with and
    without GPUs cannot train together.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    gpus_per_node: int = 0  # ALL_GPUS: every free one that fits, at least one; ANY_GPUS: see above
    gpu_memory_bytes: int | None = None
    gpu_models: tuple[str, ...] = ()  # words that a model's name must contain, any of them
    cpus: int | None = None  # None: one for each process, as far as a node has them; 0: it takes none
    memory_bytes: int = 0
    labels: tuple[str, ...] = ()
    any_of: tuple[Resources, ...] = ()  # alternatives, in order of preference; then the fields above do not count


@dataclass(frozen=True, slots=True)
class Retry:
    max_retries: int = 0
    on: tuple[str, ...] = ()  # causes of failure that are retried; empty: all but those that would surely happen again
    never_on: tuple[str, ...] = ()


class OnLost(StrEnum):
    WAIT = "wait"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Disconnect:
    lost_after_s: float = 900.0
    on_lost: OnLost = OnLost.WAIT


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


@dataclass(frozen=True, slots=True)
class ResultRule:
    """Which of a job's outputs come home."""

    checkpoints: str = "all"  # all, none, best, or "last N": of those in the output's folder ``checkpoints``
    limit_bytes: int | None = None  # of one attempt on one node


@dataclass(frozen=True, slots=True)
class JobSpec:
    name: str
    argv: tuple[str, ...]
    launcher: Launcher = Launcher.COMMAND
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    snapshot: str | None = None  # the tree of code that it runs in, by its hash; None: nothing was sent with it
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
    inputs: tuple[str, ...] = ()  # files on the master that count, by content, for the result cache
    is_cached: bool = False  # the same work that has succeeded before is not done again
    notify: tuple[str, ...] = ()
    balance: str | None = None  # off, static or adaptive; None: as the script has it

    @property
    def has_checkpoints(self) -> bool:
        """A training may write some without saying so; a plain command says that it does."""
        return self.launcher is not Launcher.COMMAND or self.checkpoint.is_given


@dataclass(frozen=True, slots=True)
class Share:
    """What one node gives to a job."""

    node: str
    gpus: tuple[int, ...] = ()  # indices
    cpus: int = 0
    memory_bytes: int = 0
    # Of the node when it was given: a start that comes after a restart of the node, or elsewhere, is refused there.
    boot_id: str | None = None
    hostname: str | None = None
    root: str | None = None

    def is_of(self, machine: Machine) -> bool:
        """False when the node's name leads to another machine or folder by now."""
        if self.root is None:
            return True
        return self.root == machine.root and (self.boot_id == machine.boot_id or self.hostname == machine.hostname)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes and devices an attempt was given, in rank order."""

    shares: tuple[Share, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(share.node for share in self.shares)

    def on(self, node: str) -> Share:
        return next(share for share in self.shares if share.node == node)


@dataclass(frozen=True, slots=True)
class Tries:
    """How often it was tried, and what the next try must respect."""

    charged: int = 0  # of the retries that its submitter allowed
    free: int = 0  # of those that cost it nothing, because machines failed and not the program
    not_before: float | None = None  # seconds since the epoch
    avoid: tuple[str, ...] = ()  # nodes to take only when no others are free


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a job: where it was, and how it went."""

    number: int
    placement: Placement
    started_at: str
    ended_at: str | None = None
    outcome: str | None = None  # the reason its job moved on
    failure: Failure | None = None


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
    ending: Ending | None = None  # set when it is to stop, by whoever decides so first
    tries: Tries = field(default_factory=Tries)
    origin: Origin | None = None
    cached_from: int | None = None  # it was not run: this job had done the same before
    results_removed_at: str | None = None

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    def lasts_s(self, now: datetime) -> float:
        """How long it has waited, has run, or took."""
        begin = self.submitted_at if self.state in WAITING_STATES or not self.started_at else self.started_at
        end = datetime.fromisoformat(self.ended_at) if self.ended_at else now
        return max(0.0, (end - datetime.fromisoformat(begin)).total_seconds())


def places(placement: Placement | None) -> str:
    """``gpu1 GPU 0–1, gpu2``"""
    shares = placement.shares if placement else ()
    return ", ".join(share.node + (f" GPU {ranges(share.gpus)}" if share.gpus else "") for share in shares)


def ranges(numbers: Iterable[int]) -> str:
    """``0–7, 9``"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
