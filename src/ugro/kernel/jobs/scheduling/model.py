"""The scheduler's input: nodes, waiting jobs, jobs that hold devices. Times are by the clock of this boot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ugro.features.power.model import PowerState
from ugro.features.quotas.rules import NO_ACCOUNTS, Accounts
from ugro.kernel.jobs.model import JobSpec, JobState, Placement

# A job that is stopping or past its time limit is assumed to end within this time. Most are quicker.
STOPPING_S = 30.0


@dataclass(frozen=True, slots=True)
class GpuView:
    index: int
    model: str
    memory_bytes: int | None = None
    is_foreign: bool = False  # a process that is not ours uses it
    is_broken: bool = False
    uuid: str = ""
    holder: str | None = None  # who has its lock on the node, in words; such a GPU is foreign


@dataclass(frozen=True, slots=True)
class Asleep:
    """Of a node that is not awake: it can be given to a job, which starts when it is."""

    state: PowerState
    since_s: float
    wakes_in_s: float  # how long that takes, as far as known
    at_most_s: float  # after which it counts as one that does not wake

    @property
    def rank(self) -> int:
        """Lower is better; 0 is awake."""
        return 1 if self.state is PowerState.WAKING else 2

    def ready(self, now: float) -> float:
        begun = self.since_s if self.state is PowerState.WAKING else now
        return max(now, begun + self.wakes_in_s)

    def latest(self, now: float) -> float:
        begun = self.since_s if self.state is PowerState.WAKING else now
        return max(now, begun + self.at_most_s)


@dataclass(frozen=True, slots=True)
class NoLogin:
    """A person whose jobs cannot start on a node now: there they run in the person's own account."""

    user: str
    reason: str  # as words after the node's name: "refuses ann: Permission denied"
    is_lasting: bool = False  # until somebody mends it


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    cores: int
    memory_bytes: int
    gpus: tuple[GpuView, ...] = ()
    labels: tuple[str, ...] = ()
    speed: float = 1.0  # relative to the other nodes, where it was measured; higher is faster
    group: str = ""  # nodes of one group are close to each other: the same subnet or switch
    # Why it takes no new jobs, as words after its name: "is drained: new fans", "is unreachable".
    unusable: str | None = None
    # Why a job would fail there, as words after its name: "has no room: 28.0 MiB left on the disk of /root/ugro".
    no_room: str | None = None
    lacks: frozenset[str] = frozenset()  # modules that its Python does not find; of others nothing is known
    cost: float = 0.0  # how busy it is, as ``kernel.links.rules`` counts it; lower is better
    is_known: bool = True  # False: its hardware has not been reported yet; only its labels are known
    is_awaited: bool = False  # its first report has not arrived yet
    is_second_name: bool = False  # another node is the same machine, and is used
    is_named: bool = False  # a job asks for it by name, so it is not like others with the same hardware
    asleep: Asleep | None = None  # None: it is awake
    is_personal: bool = False  # jobs run in the accounts of their users
    no_login: tuple[NoLogin, ...] = ()  # of the users whose jobs wait

    def objection_to(self, user: str) -> NoLogin | None:
        return next((one for one in self.no_login if one.user == user), None)


@dataclass(frozen=True, slots=True)
class Waiting:
    id: int
    user: str
    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    attempt: int = 0
    not_before: float | None = None  # the end of the pause before the next attempt
    avoid: tuple[str, ...] = ()  # where it failed, or its service has a replica; used only when no others are free

    @property
    def why_avoided(self) -> dict[str, str]:
        """By node."""
        own = set(self.spec.avoid)
        return {node: "its service has a replica there" if node in own else "it failed there" for node in self.avoid}


@dataclass(frozen=True, slots=True)
class Holding:
    id: int
    user: str
    priority: int
    placement: Placement
    submitted_at: float
    started_at: float | None = None
    time_limit_s: float | None = None
    is_preemptible: bool = False
    is_stopping: bool = False
    expected_end: float | None = None  # where more than the time limit is known
    gpu_part: float = 1.0  # how much of a shared GPU counts for its user

    @property
    def devices(self) -> int:
        return devices_of(self.placement)

    def end(self, now: float) -> float | None:
        """The latest time at which it ends, as far as known; never in the past."""
        if self.is_stopping:
            return now + STOPPING_S
        end = self.expected_end
        if end is None and self.time_limit_s is not None:
            end = (now if self.started_at is None else self.started_at) + self.time_limit_s
        if end is None:
            return None
        return end if end > now else now + STOPPING_S


@dataclass(frozen=True, slots=True)
class ClusterView:
    now: float
    nodes: tuple[NodeView, ...] = ()
    waiting: tuple[Waiting, ...] = ()  # in any order; where ``WaitingJobs`` has them from pass to pass, none are here
    holding: tuple[Holding, ...] = ()
    ended: Mapping[int, JobState] = field(default_factory=dict)  # at least the jobs that a waiting one comes after
    accounts: Accounts = NO_ACCOUNTS


def with_named(nodes: Iterable[NodeView], names: Collection[str]) -> tuple[NodeView, ...]:
    """The same nodes; those that jobs ask for by name are marked."""
    return tuple(replace(node, is_named=True) if node.name in names else node for node in nodes)


def devices_of(placement: Placement) -> int:
    """The devices counted for its user: the GPUs; a node without GPUs counts as one."""
    return sum(max(1, len(share.gpus)) for share in placement.shares)


# --- decisions --------------------------------------------------------------------------------------------------------
# Each has a reason for users, with names and figures.


@dataclass(frozen=True, slots=True)
class Start:
    job: int
    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a running job so that another can start; it is queued again."""

    job: int
    for_job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    job: int
    reason: str
    blocked_by: tuple[int, ...] = ()  # the most important of the jobs that must end, start or stop first
    may_start_at: float | None = None  # at the latest, if no more urgent job is submitted; None: unknown
    wakes: tuple[str, ...] = ()  # the nodes that it would start on once they are awake
    quota: str | None = None  # the quota that it waits for, in words
    quota_until: float | None = None  # when that has room at the latest; None: unknown


Decision = Start | Preempt | Fail | Wait
