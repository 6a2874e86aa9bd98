"""Which node names lead to one machine, and who has its GPUs. A machine gets work under one name only.

Simulated nodes and containers share a machine's boot, but neither its GPUs nor its home folder: they are nodes of their
own. Copies of a virtual machine may share its machine id, but never its boot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ugro.core.finding import Finding, Grade
from ugro.core.login import node_of
from ugro.core.node import Facts, GpuHolder, Machine, not_used

_SHORTEST_CUT = 16  # characters of a node's name that always have room in a claim (``remote.hardware.gpu_claims``)


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
