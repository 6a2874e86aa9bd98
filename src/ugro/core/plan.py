"""A plan: the exact processes of one attempt, by node. ``--dry-run`` prints what would be started."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ugro.core.code import Snapshot
from ugro.core.job import HASH_SHOWN, JobSpec, Placement
from ugro.core.planning import DeviceNeed, Prediction

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
