"""Plans of attempts; and what users have used: devices and how long they were held, energy, all against quotas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ugro.features.planning.model import DeviceNeed, Prediction
from ugro.features.quotas.model import HOUR_S
from ugro.kernel.files.model import Snapshot
from ugro.kernel.jobs.model import HASH_SHOWN, Job, JobSpec, Placement, Resources
from ugro.kernel.support.moments import Instant, elapsed_s

# --- plans ------------------------------------------------------------------------------------------------------------
# A plan has the exact processes of one attempt, by node. ``--dry-run`` prints what would be started.


NODE_PYTHON = "ugro-node-python"  # as the first word of a command: the Python of its node, or of its environment


@dataclass(frozen=True, slots=True)
class RankPlan:
    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NodePlan:
    node: str
    ranks: tuple[RankPlan, ...]
    cwd: str | None = None  # None: the attempt's own folder on the node
    environment: str | None = None  # the name of the Python environment that it uses, if UGRO made it
    path: tuple[str, ...] = ()  # folders in which its programs are looked for first
    sdk: str | None = None  # the hash of the tree with UGRO's own package, which its ranks can import
    code: str | None = None  # the hash of the tree that its folder begins as, if that is not the job's code alone
    store: RankPlan | None = None  # the process in whose store ranks meet that have lost others


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a job meet: checked to be free and reachable before any of them starts."""

    address: str
    port: int
    # The network interface by which each node reaches the others, if known.
    interfaces: tuple[tuple[str, str], ...] = ()
    is_tentative: bool = False  # a guess for ``--dry-run``; the real one is found when the job starts


@dataclass(frozen=True, slots=True)
class Plan:
    job: int
    attempt: int
    nodes: tuple[NodePlan, ...]
    rendezvous: Rendezvous | None = None

    @property
    def with_short_hashes(self) -> Plan:
        """For others than the job's user, as those of its spec."""
        return replace(self, nodes=tuple(replace(one, code=one.code and one.code[:HASH_SHOWN]) for one in self.nodes))

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)


@dataclass(frozen=True, slots=True)
class DryRun:
    spec: JobSpec
    starts_now: bool
    reason: str  # why there, or what it would wait for
    plan: Plan | None = None  # of a job that would wait: as if it were alone; None: it fits nowhere now
    placement: Placement | None = None
    snapshot: Snapshot | None = None  # of the code that would be sent
    note: str | None = None  # what would not be as the job asks
    environment: str | None = None  # the Python environment that its nodes would get, in words
    prediction: Prediction | None = None  # if its nodes were measured with this training: ``ugro plan``
    memory: tuple[DeviceNeed, ...] = ()  # the same


@dataclass(frozen=True, slots=True)
class Why:
    job: int
    text: str
    details: tuple[str, ...] = ()
    blocked_by: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()  # where those run
    may_start_at: float | None = None  # None: unknown
    quota: str | None = None  # that it waits for
    quota_until: float | None = None  # when that has room at the latest; then it needs free devices, too


# --- usage ------------------------------------------------------------------------------------------------------------


# A clock that was wrong by decades must not make a row for each of their hours.
_LONGEST_S = 400 * 86400.0


@dataclass(frozen=True, slots=True)
class Held:
    """What an attempt holds: GPUs, the cores of nodes on which it has none, and devices as the queue counts them."""

    gpus: float
    cpus: int
    devices: float

    @classmethod
    def of(cls, placement: Placement, part: float = 1.0) -> Held:
        """``part``: of a GPU that is shared."""
        gpus = math.fsum(len(share.gpus) * (part if share.gpu_group else 1.0) for share in placement.shares)
        bare = [share for share in placement.shares if not share.gpus]
        return cls(gpus, sum(share.cpus for share in bare), gpus + len(bare))


def gpu_part(resources: Resources) -> float:
    """How much of a GPU counts for a job that may share it with others."""
    return 1.0 if resources.sharing is None else 1 / resources.sharing.most


@dataclass(frozen=True, slots=True)
class HourPart:
    hour: int  # since the epoch
    seconds: float


def attempt_hours(job: Job, until: Instant) -> Iterator[HourPart]:
    """The hours of the wall clock in which its current attempt held devices, and for how long."""
    started = job.attempt_started
    if started is None or job.placement is None:
        return
    yield from hours_between(until.wall_s - min(_LONGEST_S, elapsed_s(started, until)), until.wall_s)


def hours_between(begin_s: float, end_s: float) -> Iterator[HourPart]:
    while begin_s < end_s:
        hour = math.floor(begin_s / HOUR_S)
        next_s = min(end_s, (hour + 1) * HOUR_S)
        yield HourPart(hour, next_s - begin_s)
        begin_s = next_s


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """A limit, and how much of it is used."""

    limit: str  # the key of the cluster file
    most: float
    used: float | None  # None: of a limit on single jobs


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What a user, or all members of a group, used since a time."""

    name: str
    jobs: int  # that were started
    gpu_hours: float
    cpu_hours: float
    energy_wh: float  # of what was measured
    cost: float | None  # None: no price is known
    gpus: float  # held now
    cpus: int  # held now, by jobs without GPUs
    queued: int  # jobs that wait now
    quota: tuple[QuotaUse, ...] = ()
    members: tuple[str, ...] = ()  # of a group
    average: float | None = None  # of a user: devices, as fair share counts them
    weight: float | None = None
    note: str | None = None  # what is wrong with a group


@dataclass(frozen=True, slots=True)
class UsageReport:
    since: str  # RFC 3339
    until: str
    users: tuple[UsageRow, ...]  # who used most first
    groups: tuple[UsageRow, ...]
    currency: str | None = None
    half_life_s: float = 0.0
