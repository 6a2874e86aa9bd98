"""A Ray cluster: a row that says what is wanted, and ordinary jobs: one for its head, one for each worker.

What the jobs do is read from them; only what cannot be found out again is kept in the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ugro.features.environments.model import EnvRequest
from ugro.kernel.jobs.model import FINAL_STATES, JobState

OWN_BYTES = 400_000_000  # what Ray's own processes of a worker take, beside tasks and objects


class ClusterState(StrEnum):
    ACTIVE = "active"
    STOPPING = "stopping"
    ENDED = "ended"


class Phase(StrEnum):
    """Its state as users see it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What each worker gets; None: its part of its node."""

    cpus: int | None = None
    memory_bytes: int | None = None
    object_store_bytes: int | None = None
    gpus: int = 0

    @property
    def reserved_bytes(self) -> int:
        """0: nothing was asked for."""
        return self.memory_bytes + OWN_BYTES if self.memory_bytes else 0


@dataclass(frozen=True, slots=True)
class ClusterWish:
    """What a user asks for."""

    name: str = "ray"
    nodes: int | None = None  # None: every node that can be used
    labels: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    head: str | None = None
    workers_per_node: int = 1
    size: WorkerSize = WorkerSize()
    priority: int = 50
    time_limit_s: float | None = None
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # of the head and the workers

    @property
    def advice(self) -> str | None:
        """Several workers on one node cost memory that one with all their cores would not."""
        if self.workers_per_node < 2 or self.size.gpus:
            return None
        cpus = self.size.cpus
        whole = f"one worker with {cpus * self.workers_per_node} CPUs" if cpus else "one worker with all cores"
        return f"each worker takes about 310 MB by itself; {whole} on each node is cheaper"


@dataclass(frozen=True, slots=True)
class Worker:
    number: int
    node: str
    cpus: int
    python: str  # the program on its node
    speed: float | None = None  # of its node, as measured


@dataclass(frozen=True, slots=True)
class Head:
    node: str
    python: str
    address: str  # by which the other nodes reach it
    port: int
    dashboard_port: int
    state_folder: str  # on its node, outlives attempts
    client_port: int = 10001  # of Ray Client

    @property
    def client_address(self) -> str:
        """What a program elsewhere gives to ``ray.init``."""
        return f"ray://{self.address}:{self.client_port}"


@dataclass(frozen=True, slots=True)
class RayCluster:
    id: int
    key: str  # in the names of folders and submissions
    user: str
    wish: ClusterWish
    head: Head
    token: str = field(repr=False)
    workers: tuple[Worker, ...] = ()  # those that are wanted
    dropped: tuple[Worker, ...] = ()  # those that were, and are to end
    state: ClusterState = ClusterState.ACTIVE
    failure: str | None = None  # why it ended by itself
    environment: EnvRequest | None = None
    ray_version: str = ""
    made_at: str = ""
    ended_at: str | None = None

    @property
    def name(self) -> str:
        return self.wish.name

    @property
    def next_number(self) -> int:
        return max((worker.number for worker in (*self.workers, *self.dropped)), default=0) + 1


def head_title(node: str) -> str:
    """The name of a head in Ray."""
    return f"{node}-head"


def worker_title(node: str, number: int) -> str:
    return f"{node}-{number}"


@dataclass(frozen=True, slots=True)
class Part:
    """The head or a worker as it is now."""

    title: str
    node: str
    job: int | None  # None: not submitted yet
    state: JobState | None
    cpus: int
    gpus: int
    restarts: int = 0
    is_ready: bool = False  # Ray has started there, in its newest attempt
    is_alive: bool | None = None  # as Ray says; None: it has not said
    reason: str = ""
    number: int = 0
    waits: str = ""  # what it says that it waits for, while Ray has not started there

    @property
    def has_joined(self) -> bool:
        return self.is_ready and self.is_alive is not False


@dataclass(frozen=True, slots=True)
class ClusterView:
    """For users: without the token."""

    name: str
    key: str
    user: str
    phase: Phase
    reason: str
    address: str
    dashboard_port: int
    ray_version: str
    made_at: str
    ended_at: str | None
    head: Part
    workers: tuple[Part, ...]
    client_address: str = ""

    @property
    def is_complete(self) -> bool:
        """Every wanted worker has joined."""
        return self.phase is Phase.RUNNING and all(worker.has_joined for worker in self.workers)

    @property
    def lost(self) -> Part | None:
        """A worker that has ended and does not come back by itself."""
        return next((worker for worker in self.workers if worker.state in FINAL_STATES), None)


@dataclass(frozen=True, slots=True)
class Access:
    """How a program connects to it."""

    name: str
    address: str
    token: str = field(repr=False)
    namespace: str = "default"
    dashboard_port: int = 0
    head_node: str = ""
    client_address: str = ""
