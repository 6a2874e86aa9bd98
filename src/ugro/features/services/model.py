"""A service: a row that says what is wanted, and ordinary jobs: one for each replica, one for its front door.

What the jobs do is read from them and from the door; only what cannot be found out again is kept in the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ugro.kernel.access.model import is_loopback
from ugro.kernel.jobs.model import JobSpec, JobState

# --- door -------------------------------------------------------------------------------------------------------------
# The door of a service: one address in front of its replicas, as the agent uses it.
#
# ``node/door.py`` is the program behind it. What it shares out, and how, is in docs/serving-door.md.


MOST_WEIGHT = 256
EVEN_WEIGHT = 100


class Balance(StrEnum):
    LEASTCONN = "leastconn"  # fewest requests in relation to the weight
    FIRST = "first"  # the fastest replica that has a free slot; every replica needs a limit
    ROUNDROBIN = "roundrobin"


class ServerState(StrEnum):
    READY = "ready"
    DRAIN = "drain"  # finishes what it has and gets nothing new
    DOWN = "down"  # does not pass its health checks


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Fixed while the door runs. Times are in seconds."""

    name: str
    port: int
    state_folder: str  # its name below that of all services of its account, or a whole path; outlives attempts
    address: str = "127.0.0.1"
    balance: Balance = Balance.LEASTCONN
    needs_key: bool = False
    certificate: str | None = None  # files on its node
    certificate_key: str | None = None
    health_path: str | None = None  # None: a connection is enough
    health_interval_s: float = 2.0
    health_timeout_s: float = 3.0
    health_status: tuple[int, int] = (200, 399)  # the codes that are good
    wait_s: float = 300.0  # for a replica; 0: a request is refused at once when there is none
    most_waiting: int = 512
    answer_s: float = 600.0  # between two pieces of an answer
    most_body_bytes: int = 64 << 20  # 0: any
    most_connections: int = 2000
    retries_posts: bool = True  # those that a replica dropped without an answer; it may have begun
    drain_s: float = 20.0  # at its own end


@dataclass(frozen=True, slots=True)
class NewServer:
    name: str
    address: str
    port: int
    weight: int = EVEN_WEIGHT
    limit: int = 0  # requests at once; 0: any number
    canary: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    address: str
    port: int
    weight: int
    state: ServerState
    sessions: int
    queued: int
    limit: int = 0
    canary: bool = False


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the requests of the last window, in seconds; zeros if there were none."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How a replica's time depends on how much it has to do at once: sums over requests since the door started.

    With x the logarithm of the number of requests it had, and y that of the seconds one of them took there.
    """

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counts are those since the door started."""

    requests: int = 0
    errors: int = 0  # answers with a status of 500 and above, and what was not answered
    retries: int = 0  # requests that it dropped and another one was given
    sessions: int = 0
    queued: int = 0
    latency: Latency = Latency()
    pace: Pace = Pace()


@dataclass(frozen=True, slots=True)
class DoorStats:
    requests: int = 0
    errors: int = 0  # as above, with those that the door itself refused for want of a replica
    denied: int = 0  # wrong keys, and requests that are too large or malformed
    sessions: int = 0  # requests under way, also those that wait
    queued: int = 0  # wait for a replica
    held: int = 0  # of these: wait although no replica is ready at all
    latency: Latency = Latency()
    window_s: float = 60.0  # of all latencies
    sampled_share: float = 1.0  # of the window's requests, so many were measured
    started_at: float = 0.0  # of HAProxy, in seconds since 1970: counts begin there
    servers: Mapping[str, ServerStats] = field(default_factory=dict)


class Door(Protocol):
    """Every call may be made again. Raises UgroError."""

    async def servers(self) -> dict[str, Server]: ...

    async def add(self, server: NewServer) -> None:
        """It gets requests at once. One that is there takes the new weight and limit."""

    async def set_weight(self, name: str, weight: int) -> None: ...

    async def drain(self, name: str) -> None: ...

    async def ready(self, name: str) -> None:
        """Ends a drain."""

    async def remove(self, name: str) -> None:
        """Raises NotAllowed while it has requests."""

    async def share_canary(self, share: float) -> None:
        """So many of all requests, from 0 to 1, go to the servers that are canaries."""

    async def set_keys(self, keys: Mapping[str, str]) -> None:
        """All that are let in: SHA-256 of the key in hexadecimal → its name."""

    async def stats(self) -> DoorStats: ...


# --- service ----------------------------------------------------------------------------------------------------------


LOOPBACK_BIND = "127.0.0.1"
EXHAUSTED = 64  # exit code of a replica whose program ended too often: UGRO does not try it again
ENGINE_COMMAND = "command"


class ServiceState(StrEnum):
    """What is wanted."""

    ACTIVE = "active"
    STOPPING = "stopping"
    ENDED = "ended"


class Phase(StrEnum):
    """A service as users see it."""

    STARTING = "starting"  # no replica was ready yet
    READY = "ready"
    DEGRADED = "degraded"  # fewer replicas than wanted are ready
    UPDATING = "updating"
    IDLE = "idle"  # scaled to zero; if it follows the load, the next request starts a replica
    DOWN = "down"  # no replica is ready
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class ReplicaPhase(StrEnum):
    WAITING = "waiting"  # for devices
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"  # its readiness probe fails: no traffic
    RESTARTING = "restarting"
    UNREACHABLE = "unreachable"
    DRAINING = "draining"  # finishes what it has
    STOPPING = "stopping"
    FAILED = "failed"  # its program ended too often
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Probe:
    """An HTTP request to the replica, from its own node. Without a path: whether its port accepts a connection."""

    path: str | None = None
    interval_s: float = 1.0
    timeout_s: float = 5.0
    failures: int = 3  # in a row, before it counts
    status: tuple[int, int] = (200, 399)  # the codes that are good


@dataclass(frozen=True, slots=True)
class Probes:
    start: Probe = Probe(interval_s=0.2, timeout_s=600.0, failures=1)  # its timeout is that of the whole start
    ready: Probe = Probe()
    live: Probe = Probe(interval_s=5.0, failures=3)


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often the program of a replica may end by itself within a time, before it counts as failed."""

    most: int = 5
    within_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Update:
    surge: int = 1  # replicas beyond the wanted number while an update runs
    timeout_s: float = 600.0  # for each new replica to be ready
    canary: float | None = None  # the share of requests for a new revision, unless an update says another


@dataclass(frozen=True, slots=True)
class Tls:
    """Files on the door's node."""

    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Bounds and targets of a number of replicas that follows the load."""

    least: int = 1
    most: int = 1
    queue: float = 2.0  # requests that wait or run, for each replica
    latency_s: float | None = None  # the 90th percentile to stay below
    idle_s: float = 300.0  # without a request, before the last replica goes (least: 0)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How it is served. What runs is in its revisions."""

    name: str
    port: int = 8000
    bind: str = LOOPBACK_BIND
    tls: Tls | None = None
    needs_keys: bool = False
    probes: Probes = field(default_factory=Probes)
    concurrency: int = 0  # requests at once for each replica; 0: no limit
    drain_s: float = 30.0
    restarts: Restarts = field(default_factory=Restarts)
    update: Update = field(default_factory=Update)
    scale: Autoscale | None = None
    spreads: bool = True  # replicas prefer nodes that have none
    retries_posts: bool = True  # a POST that was not answered is sent to another replica
    timeout_s: float = 600.0  # for the answer to a request
    door_lost_after_s: float | None = 300.0  # then the door goes to another node; None: it waits for its own

    @property
    def is_open(self) -> bool:
        """Other machines reach it."""
        return not is_loopback(self.bind)


@dataclass(frozen=True, slots=True)
class Revision:
    """What replicas run: the job that each of them is, before it gets a number and a place."""

    number: int
    job: JobSpec
    source: str  # in words: where its model came from, or the command
    engine: str = ENGINE_COMMAND
    made_at: str = ""
    request_key: str = ""  # that its client chose: the same key is the same revision
    note: str = ""  # for users: what its engine does not do


@dataclass(frozen=True, slots=True)
class Replica:
    number: int  # never used again
    revision: int
    dropped: str | None = None  # why it is to go


@dataclass(frozen=True, slots=True)
class Rollout:
    """An update that is under way, from the current revision to another."""

    revision: int
    canary: float | None = None  # the share of requests that the new one gets, until somebody decides
    is_promoted: bool = False
    begun_at: str = ""
    served: int | None = None  # replicas that had requests when it began: no more can be expected on the way

    @property
    def is_held(self) -> bool:
        return self.canary is not None and not self.is_promoted


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Only its hash is kept."""

    id: str
    label: str
    sha256: str
    made_at: str


@dataclass(frozen=True, slots=True)
class DoorPlace:
    node: str
    python: str
    address: str  # at which the nodes reach it
    is_here: bool = False  # on the agent's own machine
    number: int = 1  # of its job: another one if that has ended
    moved_from: str = ""  # the node before this one, which was lost


@dataclass(frozen=True, slots=True)
class Service:
    id: int
    key: str  # in the names of its jobs' keys
    user: str
    spec: ServiceSpec
    door: DoorPlace
    wanted: int
    revision: int  # the current one
    revisions: tuple[Revision, ...]
    secret: str  # between the door and the replicas
    replicas: tuple[Replica, ...] = ()
    next_number: int = 1
    rollout: Rollout | None = None
    note: str = ""  # how the last update ended
    keys: tuple[ApiKey, ...] = ()
    state: ServiceState = ServiceState.ACTIVE
    failure: str | None = None
    made_at: str = ""
    ended_at: str | None = None
    was_ready: bool = False
    request_key: str = ""  # that its client chose: the same key is the same service

    @property
    def name(self) -> str:
        return self.spec.name

    def of(self, number: int) -> Revision:
        return next(one for one in self.revisions if one.number == number)

    @property
    def has_ended(self) -> bool:
        return self.state is ServiceState.ENDED

    @property
    def current(self) -> Revision:
        return self.of(self.revision)


# --- what a node says of a replica ---------------------------------------------------------------------------------


class ProbeState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a replica's engine counts about itself, if it does."""

    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    batch_size: float | None = None  # requests that it computes together


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """From the program that runs a replica on its node."""

    state: ProbeState
    reason: str = ""
    host: str = ""
    port: int = 0
    restarts: int = 0
    pid: int = 0
    figures: Figures = Figures()


# --- what users see ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of a service or a replica. Latencies are those of the last minute, in seconds; None: no request."""

    requests: int = 0
    errors: int = 0
    active: int = 0  # requests that run now
    queued: int = 0
    rate: float = 0.0  # requests per second
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    retries: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    number: int
    state: ReplicaPhase
    reason: str = ""
    revision: int = 1
    job: int | None = None
    job_state: JobState | None = None
    node: str | None = None
    devices: str = ""  # gpu1 GPU 0
    address: str = ""  # HOST:PORT
    weight: int | None = None  # in the door; None: it is not there
    restarts: int = 0
    is_new: bool = False  # of an update that is under way
    traffic: Traffic = Traffic()
    figures: Figures = Figures()


@dataclass(frozen=True, slots=True)
class DoorReport:
    node: str
    job: int | None = None
    state: JobState | None = None
    reason: str = ""
    is_open: bool = False  # it answers its control socket
    is_here: bool = False  # on the agent's own machine


@dataclass(frozen=True, slots=True)
class ServiceReport:
    id: int
    name: str
    user: str
    state: Phase
    reason: str
    url: str
    wanted: int
    ready: int
    revision: int
    source: str
    engine: str
    door: DoorReport
    replicas: tuple[ReplicaReport, ...]
    traffic: Traffic
    held: int = 0  # requests that wait for a cold start
    update: str = ""  # in words
    note: str = ""
    is_canary: bool = False
    least: int | None = None
    most: int | None = None
    needs_keys: bool = False
    keys: int = 0
    has_tls: bool = False
    is_open: bool = False  # other machines reach it
    made_at: str = ""
    ended_at: str | None = None
    model: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None


@dataclass(frozen=True, slots=True)
class KeyReport:
    id: str
    label: str
    made_at: str
