"""Nodes that sleep: a job is placed on those that are awake first; where that fails, also on those that can be woken.

A job that was given a node that sleeps keeps all its devices in this pass, and starts when the node is awake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ugro.policy.scheduling import reasons
from ugro.policy.scheduling.cluster_view import NodeView
from ugro.policy.scheduling.decision import Start, Wait
from ugro.policy.scheduling.demand import Demand, Need


class Sleepers:
    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = {node.name: node for node in nodes if node.asleep is not None and node.unusable is None}
        self._awake: dict[Demand, Demand] = {}
        self._needs: dict[int, Need] = {}

    def awake(self, demand: Demand) -> Demand:
        """The same of nodes that are awake; the same object if all are."""
        if not self._nodes:
            return demand
        found = self._awake.get(demand)
        if found is None:
            needs = tuple(replace(need, wants_awake=True, _fitting={}) for need in demand.needs)
            found = self._awake[demand] = Demand(needs)
        return found

    def soonest(self, now: float) -> float:
        """When the first of them could be awake."""
        return min(node.asleep.ready(now) for node in self._nodes.values() if node.asleep is not None)

    def note(self, job: int, need: Need) -> None:
        """By which alternative it was placed."""
        if self._nodes:
            self._needs[job] = need

    def waited_for(self, start: Start, now: float) -> Wait | None:
        """None if all its nodes are awake."""
        found = [self._nodes[name] for name in start.placement.nodes if name in self._nodes]
        if not found:
            return None
        blocked = reasons.waits_for_sleepers(self._needs[start.job], found, now)
        return Wait(start.job, blocked.reason, (), blocked.until, tuple(node.name for node in found))
