"""A plan: the exact processes of one attempt, per node. What ``--dry-run`` prints is what is started."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.code import Snapshot
from ugro.core.job import JobSpec, Placement


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


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a job meet: proven free and reachable before any of them starts."""

    address: str
    port: int
    # The network interface of each node that reaches the others, where it is known.
    interfaces: tuple[tuple[str, str], ...] = ()
    is_tentative: bool = False  # a guess for ``--dry-run``: the real one is found when the job starts


@dataclass(frozen=True, slots=True)
class Plan:
    job: int
    attempt: int
    nodes: tuple[NodePlan, ...]
    rendezvous: Rendezvous | None = None

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)


@dataclass(frozen=True, slots=True)
class DryRun:
    spec: JobSpec
    starts_now: bool
    reason: str  # why there, or what it would wait for
    plan: Plan | None = None  # of one that would wait: as if nobody else were here; None: it fits nowhere now
    placement: Placement | None = None
    snapshot: Snapshot | None = None  # of the code that would go along
