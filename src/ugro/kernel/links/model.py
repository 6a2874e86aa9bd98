"""A node: how it is reached (``NodeSpec``), what it is (``Machine``), what a probe found (``Facts``), the verdict.

Names carry their units; ``None`` means "not known", never zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from ugro.features.power.model import OwnerReport, OwnerRule, PowerReport, PowerRule, PowerState
from ugro.kernel.access.model import login_name, node_of

# --- host keys --------------------------------------------------------------------------------------------------------
# A node's SSH host key, as shown to the person who has to accept it.


@dataclass(frozen=True, slots=True)
class HostKey:
    node: str
    address: str  # as known_hosts names it
    fingerprints: tuple[str, ...]  # one per key: "SHA256:… (ED25519)"
    known_fingerprints: tuple[str, ...]  # what known_hosts had before
    is_trusted: bool
    known_hosts: str  # the file it is, or will be, written to

    @property
    def is_changed(self) -> bool:
        return bool(self.known_fingerprints) and not self.is_trusted


# --- nodes ------------------------------------------------------------------------------------------------------------


_LAST_S = 2**37  # in the year 6325


class Role(StrEnum):
    MASTER = "master"
    WORKER = "worker"


class Status(StrEnum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"
    UNREACHABLE = "unreachable"
    GOING_TO_SLEEP = PowerState.GOING_TO_SLEEP.value
    ASLEEP = PowerState.ASLEEP.value
    WAKING = PowerState.WAKING.value

    @property
    def is_asleep(self) -> bool:
        """Not awake: it takes no part, and nothing is wrong with it."""
        return self in (Status.GOING_TO_SLEEP, Status.ASLEEP, Status.WAKING)

    @property
    def is_up(self) -> bool:
        return self is not Status.UNREACHABLE and not self.is_asleep


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """How a node is reached, as configured. If a spec does not change, its link stays open."""

    name: str
    host: str = ""  # what ssh connects to; empty: the name, resolved by the user's ssh configuration
    user: str | None = None
    port: int | None = None
    role: Role = Role.WORKER
    gpu: str | None = None  # what the user wrote; detected values take precedence
    vram_bytes: int | None = None
    labels: tuple[str, ...] = ()
    python: str | None = None
    remote_root: str = "~/grid_workspace"  # {user} in it is the account there
    # "ssh", "local", or an argv prefix that gives stdin and stdout on the node.
    transport: str | tuple[str, ...] = "ssh"
    env: tuple[tuple[str, str], ...] = ()
    owner: OwnerRule | None = None  # None: its owner is not looked for
    power: PowerRule | None = None  # None: it is neither suspended nor woken
    found_by: str | None = None  # the source of a node that is not configured; its host key must be known
    account: str | None = None  # with {user} in it: jobs log in as the person whose they are; None: as ``user``

    def login(self, account: str) -> NodeSpec:
        """The same node, reached as one person."""
        return replace(self, name=login_name(account, self.name), user=account, account=None)

    @property
    def ssh_host(self) -> str:
        """What ssh connects to."""
        return self.host or node_of(self.name)

    @property
    def target(self) -> str:
        """What a person would type after ``ssh``."""
        return f"{self.user}@{self.ssh_host}" if self.user else self.ssh_host


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change while a node program runs; sent once when a link opens."""

    hostname: str
    os: str
    kernel: str
    arch: str
    boot_id: str
    user: str
    root: str
    python: str
    python_path: str
    cores: int
    cpu_model: str
    memory_total_bytes: int
    machine_id: str = ""  # stays the same when the machine restarts; copies of a disk have the same
    home: str = ""  # of the account, without symbolic links
    home_id: str = ""  # tells it from a folder with the same path in another container


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    name: str
    memory_bytes: int | None = None
    is_ours: bool = False
    job: str | None = None


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """Who has a GPU on its machine. In a report, only those that are not this agent's on this node.

    Of a process in another account that says nothing about itself, at most the user is known.
    """

    agent: str
    node: str
    job: str
    attempt: int
    user: str
    since: float  # seconds since the epoch
    is_leftover: bool = False  # its supervisor is gone, and some of its processes live
    is_same_agent: bool = False  # started by this agent, under another name for this machine

    def __str__(self) -> str:
        if not self.job and not self.since:
            return f"a process of user {self.user}" if self.user else "a process of another account"
        what = f"job {self.job}" if self.job else "a measurement"
        who = f"{what} on {self.node}" if self.is_same_agent else f"{what} of another agent"
        # The node says when: a time that no calendar has must not keep others from being told.
        since = datetime.fromtimestamp(self.since if 0 <= self.since < _LAST_S else 0, UTC).strftime("%H:%M UTC")
        left = "processes that are left of " if self.is_leftover else ""
        return f"{left}{who} (user {self.user}, since {since})"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. ``error`` is set if it exists but cannot be read, for example after it fell off the bus."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    use_ratio: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None  # what it has used since its driver was loaded
    throttle: tuple[str, ...] | None = None  # what throttles it now: power, heat, hardware; None: not known
    processes: tuple[GpuProcess, ...] = ()
    error: str | None = None
    holder: GpuHolder | None = None

    @property
    def model(self) -> str:
        """The short name, without the vendor."""
        return self.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removesuffix(" Laptop GPU")

    @property
    def memory_ratio(self) -> float | None:
        if not self.memory_total_bytes or self.memory_used_bytes is None:
            return None
        return self.memory_used_bytes / self.memory_total_bytes


@dataclass(frozen=True, slots=True)
class Disk:
    mount: str
    total_bytes: int
    free_bytes: int

    @property
    def used_ratio(self) -> float:
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How a node holds jobs to what they ask for: cgroup2, cgroup1, systemd, affinity or none."""

    cpus: str
    memory: str

    @property
    def words(self) -> str:
        if self.cpus == self.memory and self.holds_memory:
            return f"cpus and memory of jobs are limited by {_LIMITED_BY[self.memory]}"
        by = _LIMITED_BY.get(self.cpus)
        cpus = f"cpus of jobs are limited by {by}" if by else "cpus of jobs are not limited"
        memory = f"memory by {_LIMITED_BY[self.memory]}" if self.holds_memory else "their memory is not limited"
        return f"{cpus}, {memory}"

    @property
    def holds_memory(self) -> bool:
        return self.memory in _LIMITED_BY


_LIMITED_BY = {
    "cgroup2": "control groups",
    "cgroup1": "control groups (version 1)",
    "systemd": "systemd",
    "affinity": "affinity",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What one probe found."""

    time_unix: float
    uptime_s: float
    load: tuple[float, float, float]
    cpu_use_ratio: float | None
    memory_total_bytes: int
    memory_available_bytes: int
    disks: tuple[Disk, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_source: str | None = None  # nvml, nvidia-smi, amd-smi or rocm-smi
    gpu_driver: str | None = None
    gpu_error: str | None = None
    rank_processes: int = 0
    limits: Limits | None = None

    @property
    def root_disk(self) -> Disk | None:
        """The disk that has UGRO's folder: a probe lists it first."""
        return self.disks[0] if self.disks else None

    @property
    def memory_used_ratio(self) -> float:
        if not self.memory_total_bytes:
            return 0.0
        return 1 - self.memory_available_bytes / self.memory_total_bytes


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """Measured by the agent with the link's keepalives."""

    rtt_s: float | None = None
    loss_ratio: float = 0.0  # of keepalives in the last minute, the part not answered in time
    clock_offset_s: float | None = None  # the node's clock minus ours


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that took points from a node's score."""

    part: str  # gpu, system, network or processes
    text: str
    points: float


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node as ``ugro health`` shows it."""

    name: str
    status: Status
    score: int
    reasons: tuple[Reason, ...] = ()
    checked_at: str = ""  # RFC 3339
    since: str | None = None  # when it became unreachable
    error: str | None = None
    hint: str | None = None
    cause: str | None = None  # the stable word for an error: refused, host-key-unknown, python-missing, …
    drained: str | None = None  # the reason given, if it takes no new work
    same_as: str | None = None  # the name under which this machine is used, if that is another one
    role: Role = Role.WORKER
    labels: tuple[str, ...] = ()
    target: str = ""
    found_by: str | None = None  # the source that lists it, if it joined by itself
    machine: Machine | None = None
    facts: Facts | None = None
    link: LinkQuality = field(default_factory=LinkQuality)
    owner: OwnerReport | None = None  # None: nobody is looked for there
    power: PowerReport | None = None  # None: it never sleeps

    @property
    def owner_note(self) -> str | None:
        """That it takes no new jobs because somebody uses it, without its name."""
        words = self.owner.words if self.owner and self.facts else None
        return words.removeprefix("is ") if words else None

    @property
    def power_note(self) -> str | None:
        """How long it has been asleep and why, or what went wrong with that."""
        return (self.power.words or None) if self.power else None

    @property
    def second_name(self) -> str | None:
        """What is said of a node that is not used, because it is another name for a machine."""
        return not_used(self.same_as) if self.same_as else None

    @property
    def taken_gpus(self) -> list[str]:
        """Who else has which GPU."""
        gpus = self.facts.gpus if self.facts else ()
        return [f"GPU {gpu.index} is used by {gpu.holder}" for gpu in gpus if gpu.holder is not None]


def not_used(first_name: str) -> str:
    return f"the same machine as {first_name}: not used"


def by_name(name: str) -> list[tuple[int, int, str]]:
    """A sort key: gpu2 comes before gpu10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


# --- best node --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exclusion:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    cost: float
    reason: str
    excluded: tuple[Exclusion, ...] = ()
