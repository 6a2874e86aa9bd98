"""Decisions about nodes: whether one is asked and how soon again, which names are one machine, which node is best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from ugro.features.power.model import OwnerReport
from ugro.kernel.access.model import node_of
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.links.model import (
    Choice,
    Disk,
    Exclusion,
    Facts,
    Gpu,
    GpuHolder,
    LinkQuality,
    Machine,
    NodeReport,
    NodeSpec,
    Status,
    not_used,
)
from ugro.kernel.support.quantities import count_of, format_size, names
from ugro.node.messages import Packages, Ports, Root, Survival

# --- the circuit breaker of a node ------------------------------------------------------------------------------------
# The agent stops asking a node that keeps failing, for a while. A link that opens or is heard again meanwhile is a sign
# of life, and the node is asked at once.


class BreakerState(StrEnum):
    CLOSED = "closed"  # the node is asked as usual
    OPEN = "open"  # the node is not asked
    HALF_OPEN = "half-open"  # the pause is over, or its link is back: the next answer decides


@dataclass(frozen=True, slots=True)
class Limits:
    failures: int = 3
    pause_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """Times are seconds of a monotonic clock."""

    failures: int = 0  # in a row
    opened_at: float | None = None

    def after(self, has_answered: bool, now: float, limits: Limits) -> Breaker:
        if has_answered:
            return Breaker()
        failed = replace(self, failures=self.failures + 1)
        # A failure after the pause starts another pause.
        return replace(failed, opened_at=now) if failed.failures >= limits.failures else failed

    def state(self, now: float, limits: Limits, *, alive_since: float | None = None) -> BreakerState:
        """``alive_since``: when its link was opened, or last answered again after a silence."""
        if self.opened_at is None:
            return BreakerState.CLOSED
        has_shown_up = alive_since is not None and alive_since > self.opened_at
        is_over = now - self.opened_at >= limits.pause_s
        return BreakerState.HALF_OPEN if has_shown_up or is_over else BreakerState.OPEN

    def reason(self, now: float, limits: Limits) -> str:
        if self.opened_at is None:
            return f"{self.failures} failures in a row" if self.failures else "it answers"
        left_s = max(0.0, limits.pause_s - (now - self.opened_at))
        return f"{self.failures} failures in a row; asked again in {left_s:.0f} s, or when its link is back"


# --- how soon a node is probed again ----------------------------------------------------------------------------------
# It is probed often while there are jobs, and rarely when the cluster has been idle for long.


RECENT_S = 30 * 60.0
QUIET_S = 2 * 60 * 60.0
LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between two probes of a node, by how long ago there were jobs."""

    busy_s: float = 5.0
    recent_s: float = 10.0
    quiet_s: float = 20.0
    idle_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Poll:
    interval_s: float
    reason: str


def poll(pace: Pace, *, jobs: int, idle_s: float, failures: int = 0) -> Poll:
    """``jobs``: how many have not ended. ``idle_s``: since a job last changed. ``failures`` of this node in a row."""
    if jobs:
        return _poll(pace.busy_s, f"{jobs} jobs are not over" if jobs > 1 else "a job is not over")
    if failures:
        return _poll(pace.busy_s, "it did not answer the last time")
    if idle_s < RECENT_S:
        return _poll(pace.recent_s, "there was work within the last 30 minutes")
    if idle_s < QUIET_S:
        return _poll(pace.quiet_s, "there was work within the last 2 hours")
    return _poll(pace.idle_s, "there was no work for 2 hours")


def _poll(interval_s: float, reason: str) -> Poll:
    return Poll(min(interval_s, LONGEST_S), reason)


# --- room on a node's disk --------------------------------------------------------------------------------------------
# Jobs need room for their code, logs and checkpoints, which are in ``remote_root``.


LITTLE_SPACE_BYTES = 2**30
# A start needs its code, and leaves some room for what others write meanwhile.
NO_SPACE_BYTES = 100 * 2**20


def lack_of_room(disk: Disk | None) -> str | None:
    """Why jobs would fail there, as words after the node's name; None if there is room."""
    if disk is None or disk.free_bytes >= NO_SPACE_BYTES:
        return None
    return f"has no room: {format_size(disk.free_bytes)} left on the disk of {disk.mount}"


# --- what the doctor finds out about a node ---------------------------------------------------------------------------
# It is judged elsewhere.


@dataclass(frozen=True, slots=True)
class Unknown:
    """In place of what a check would have found: why it found nothing."""

    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class SshSettings:
    """The user's own ssh configuration for a node, as ``ssh -G`` prints it."""

    strict_host_key_checking: str
    user_known_hosts_file: str


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found on one node; ``None`` where there was nothing to check."""

    spec: NodeSpec
    machine: Machine
    quality: LinkQuality
    facts: Facts | Unknown
    ssh: SshSettings | Unknown | None
    root: Root | Unknown
    ports: Ports | Unknown
    port_keys: Mapping[int, str]  # the key in cluster.yaml that names each port
    survival: Survival | Unknown | None
    packages: Packages | Unknown
    strange_runs: str | None = None  # what it reports that is not believed
    owner: OwnerReport | None = None

    @property
    def name(self) -> str:
        return self.spec.name


# --- GPUs that vanished or appeared -----------------------------------------------------------------------------------
# Two probes of a node are compared.


def gpu_changes(before: Facts, now: Facts) -> list[str]:
    """A driver that cannot be read says nothing about which GPUs there are."""
    if before.gpu_error is not None or now.gpu_error is not None:
        return []
    old, new = _by_id(before), _by_id(now)
    gone = [_label(gpu) for key, gpu in old.items() if key not in new]
    come = [_label(gpu) for key, gpu in new.items() if key not in old]
    left = f"it has {count_of(len(new), 'GPU')} now" if new else "it has no GPU now"
    verbs = ((gone, "vanished"), (come, "appeared"))
    return [f"{names(some)} {verb}; {left}" for some, verb in verbs if some]


def _by_id(facts: Facts) -> dict[str, Gpu]:
    """By UUID: indexes move when a GPU vanishes."""
    return {gpu.uuid or f"#{gpu.index}": gpu for gpu in facts.gpus}


def _label(gpu: Gpu) -> str:
    return f"GPU {gpu.index} {gpu.model}"


# --- names that lead to one machine -----------------------------------------------------------------------------------
# A machine gets work under one name only. Simulated nodes and containers share a machine's boot, but neither its GPUs
# nor its home folder: they are nodes of their own. Copies of a virtual machine may share its machine id, but never its
# boot.


_SHORTEST_CUT = 16  # characters of a node's name that always have room in a claim (``node.hardware.gpu_claims``)


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is known of a node that has answered at least once."""

    name: str
    machine: Machine
    gpus: frozenset[str] = frozenset()  # UUIDs
    has_jobs: bool = False
    is_reachable: bool = True


def second_names(seen: Sequence[Sighting]) -> dict[str, str]:
    """For each name that is not used: the one that is. ``seen`` is in the order of the cluster file.

    A name with running jobs comes first, so that they stay with a node that is used; then one that answers.
    """
    found: dict[str, str] = {}
    used: list[Sighting] = []
    for one in sorted(seen, key=lambda one: (not one.has_jobs, not one.is_reachable)):
        first = next((other for other in used if is_same_machine(one, other)), None)
        if first is None:
            used.append(one)
        else:
            found[one.name] = first.name
    return found


def drained_machines(drained: Mapping[str, str], seconds: Mapping[str, str]) -> dict[str, str]:
    """By name, the reasons given. A drain is meant for the machine, under whichever of its names it is used."""
    of_others = {first: drained[name] for name, first in seconds.items() if name in drained}
    return {**of_others, **drained}


def is_same_machine(one: Sighting, other: Sighting) -> bool:
    if not one.machine.boot_id or one.machine.boot_id != other.machine.boot_id:
        return False
    # The folder belongs to it: who gives a machine two names with different folders wants two nodes without GPUs.
    return bool(one.gpus & other.gpus) or (one.machine.home_id != "" and _place(one.machine) == _place(other.machine))


def _place(machine: Machine) -> tuple[str, ...]:
    return machine.machine_id, machine.user, machine.home, machine.home_id, machine.root


def judge_names(names: Sequence[str], seconds: Mapping[str, str]) -> Iterator[Finding]:
    for name in names:
        if name in seconds:
            remedy = f"remove the name: ugro node rm {name}"
            yield Finding(name, "same machine", Grade.WARNING, not_used(seconds[name]), remedy)


def with_other_holders(facts: Facts, agent: str, node: str) -> Facts:
    """Names as holders of GPUs only those that are not this agent on this node, in whichever account of it."""
    if all(gpu.holder is None for gpu in facts.gpus):
        return facts
    gpus = tuple(replace(gpu, holder=_other(gpu.holder, agent, node)) for gpu in facts.gpus)
    return replace(facts, gpus=gpus)


def _other(holder: GpuHolder | None, agent: str, node: str) -> GpuHolder | None:
    if holder is None or (holder.agent == agent and _is_called(node, holder.node) and not holder.is_leftover):
        return None
    return replace(holder, is_same_agent=holder.agent == agent)


def _is_called(node: str, said: str) -> bool:
    """Whether a claim means this node: it has its name, of which the end may be cut where it is long."""
    name = node_of(said)
    return name == node or (len(name) >= _SHORTEST_CUT and node.startswith(name))


# --- the best node for a command --------------------------------------------------------------------------------------
# It has the lowest cost. Nothing is reserved.


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    status: Status
    cores: int | None = None
    facts: Facts | None = None
    drained: str | None = None  # the reason given, if it takes no new jobs
    speed: float = 1.0  # relative to the other nodes, where it was measured
    owner: str | None = None  # that somebody uses it, and it takes no new jobs

    @classmethod
    def of(cls, report: NodeReport) -> Candidate:
        cores = report.machine.cores if report.machine else None
        owner = report.owner.words if report.owner else None
        return cls(report.name, report.status, cores, report.facts, report.drained, owner=owner)


def best_node(candidates: Sequence[Candidate], *, cpu_weight: float, gpu_weight: float) -> Choice | None:
    """The cheapest node that can take work. Of those that cost about the same, the fastest; then the first by name.

    If there is none, ``exclusions`` says why.
    """
    offers = [
        _offer(candidate, facts, cpu_weight, gpu_weight)
        for candidate in candidates
        if isinstance(facts := _facts_or_objection(candidate), Facts)
    ]
    if not offers:
        return None
    offers.sort(key=lambda offer: (round(offer.cost, 1), -offer.speed, offer.cost, offer.name))
    return Choice(offers[0].name, offers[0].cost, _reason(offers), exclusions(candidates))


def exclusions(candidates: Sequence[Candidate]) -> tuple[Exclusion, ...]:
    return tuple(
        Exclusion(candidate.name, objection)
        for candidate in candidates
        if isinstance(objection := _facts_or_objection(candidate), str)
    )


@dataclass(frozen=True, slots=True)
class _Offer:
    name: str
    cost: float
    load_per_core: float
    gpu_memory_ratio: float | None
    speed: float


def _facts_or_objection(candidate: Candidate) -> Facts | str:
    if not candidate.status.is_up or candidate.status is Status.UNHEALTHY:
        return f"is {candidate.status}"
    if candidate.drained is not None:
        return f"is drained: {candidate.drained}" if candidate.drained else "is drained"
    if candidate.owner is not None:
        return candidate.owner
    return "has not been probed yet" if candidate.facts is None else candidate.facts


def _offer(candidate: Candidate, facts: Facts, cpu_weight: float, gpu_weight: float) -> _Offer:
    # A node that did not report its cores counts as the smallest possible.
    load_per_core = facts.load[0] / (candidate.cores or 1)
    ratios = [gpu.memory_ratio for gpu in facts.gpus if not gpu.error]
    known = [ratio for ratio in ratios if ratio is not None]
    gpu_memory_ratio = fmean(known) if known else None
    cost = cpu_weight * load_per_core + gpu_weight * (gpu_memory_ratio or 0.0)
    return _Offer(candidate.name, cost, load_per_core, gpu_memory_ratio, candidate.speed)


def _reason(offers: Sequence[_Offer]) -> str:
    best = offers[0]
    gpu = "" if best.gpu_memory_ratio is None else f", {best.gpu_memory_ratio * 100:.0f} % of GPU memory used"
    why = f"{best.name} costs {best.cost:.2f} (load {best.load_per_core:.2f} per core{gpu})"
    if len(offers) == 1:
        return f"{why}; no other node can take work"
    next_best = offers[1]
    if best.speed > next_best.speed and round(next_best.cost, 1) == round(best.cost, 1):
        return f"{why}, about the same as {next_best.name}, and was measured to be faster"
    if next_best.cost == best.cost:
        return f"{why}, the same as {next_best.name}; the first by name is taken"
    return f"{why}; the next is {next_best.name} at {next_best.cost:.2f}"
