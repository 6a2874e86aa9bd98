"""What is seen of nodes that may sleep: their links, whether they are silent, and how long nothing was done there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ugro.agent.engine.reconciler import Engine
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.owners import Owners
from ugro.agent.tracking.scheduler_input import SchedulerInput
from ugro.core.login import node_of
from ugro.core.node import NodeSpec
from ugro.core.owner import OwnerRule, Then, When
from ugro.core.support.clock import boot_clock_s, boot_id
from ugro.nodes.link import Link
from ugro.nodes.node import Node
from ugro.policy.power.use import Busy, Use, busy_with
from ugro.policy.scheduling.scheduler import NodeWishes

# How a machine that sleeps fails to answer. One that refuses a connection is awake.
_SILENT = frozenset({"timed-out", "no-route", "hung"})
_NO_WISHES = NodeWishes()
_QUIET_S = 600.0


@dataclass(slots=True)
class Seen:
    link: Link | None = None
    linked_s: float | None = None
    silent_s: float | None = None
    uses: Mapping[str, int] = field(default_factory=dict)  # of its link and those of its logins, so far
    busy_s: float = field(default_factory=boot_clock_s)  # when it was last busy

    @property
    def idle_s(self) -> float:
        return boot_clock_s() - self.busy_s

    def was_linked_before(self, since_s: float) -> bool:
        return self.linked_s is not None and self.linked_s <= since_s


class NodeLooks:
    def __init__(self, cluster: Cluster, engine: Engine, scheduler_input: SchedulerInput) -> None:
        self._cluster = cluster
        self._engine = engine
        self._input = scheduler_input
        self._owners = Owners(cluster, None, _presence)
        self._seen: dict[str, Seen] = {}
        # Whether a node has said what runs there since its link was opened: no job starts there before.
        self.is_heard: Callable[[str], bool] = lambda node: True
        self._uncollected: set[str] = set()
        self._holders: dict[str, tuple[int, ...]] = {}
        self._logins: dict[str, list[Node]] = {}

    async def close(self) -> None:
        await self._owners.close()

    def keep_up(self, nodes: Sequence[Node], uncollected: set[str]) -> None:
        """``uncollected``: the nodes that have files of jobs which are not here yet."""
        self._uncollected = uncollected
        self.note_jobs()
        self._owners.keep_up()
        members = {node.spec.name for node in nodes}
        self._seen = {name: seen for name, seen in self._seen.items() if name in members}
        for node in nodes:
            self._note(node)

    def of(self, node: Node) -> Seen:
        return self._seen.setdefault(node.spec.name, Seen())

    def changed(self, name: str) -> None:
        """Its state has changed: it was not idle until now."""
        if name in self._seen:
            self._seen[name].busy_s = boot_clock_s()

    def note_jobs(self) -> None:
        """Which jobs have devices where, and through which logins nodes are reached."""
        self._logins = {}
        for login in self._cluster.inventory.logins:
            self._logins.setdefault(node_of(login.spec.name), []).append(login)
        found: dict[str, tuple[int, ...]] = {}
        for job in self._engine.live.holding():
            for name in job.placement.node_names if job.placement is not None else ():
                found[name] = (*found.get(name, ()), job.id)
        self._holders = found

    def holders(self, name: str) -> tuple[int, ...]:
        return self._holders.get(name, ())

    def may_sleep(self, node: Node) -> bool:
        """Whether nothing but the queue could keep it awake."""
        rule = node.spec.power
        if rule is None or rule.suspend_after_s is None or node.link is None:
            return False
        return self.of(node).idle_s >= rule.suspend_after_s

    def busy(self, node: Node, wishes: NodeWishes) -> Busy | None:
        rule, name, link = node.spec.power, node.spec.name, node.link
        if rule is None or link is None:
            return None
        seen = self._input.reports.of(node)
        machine = node.machine
        use = Use(
            facts=seen.report.facts if seen.report is not None else None,
            cores=machine.cores if machine else 1,
            owner=self._owners.report(name),
            jobs=self.holders(name),
            is_uncollected=name in self._uncollected,
            held=self._input.holds.reason(name),
            calls=tuple(call for one in self._links(node) for call in one.work),
            drained=seen.report.drained if seen.report is not None else None,
            is_needed=name in wishes.needed,
            is_this_machine=machine is not None and machine.boot_id == boot_id(),
            is_excluded=rule.suspend_after_s is None and name in self._cluster.config.power.exclude,
        )
        return busy_with(use, rule)

    def _links(self, node: Node) -> list[Link]:
        """To the machine, in whatever account."""
        return [one.link for one in (node, *self._logins.get(node.spec.name, ())) if one.link is not None]

    def _note(self, node: Node) -> None:
        seen, now_s = self.of(node), boot_clock_s()
        if node.link is not seen.link:
            seen.link, seen.linked_s = node.link, None
            seen.uses = {}
            seen.busy_s = now_s
        if seen.linked_s is None and node.link is not None and self.is_heard(node.spec.name):
            seen.linked_s = now_s
        is_silent = node.link is None and node.error is not None and node.error.cause in _SILENT
        seen.silent_s = (seen.silent_s if seen.silent_s is not None else now_s) if is_silent else None
        uses = {link.spec.name: link.uses for link in self._links(node)}
        # A link that is gone was not used, nor was one that is new and has done nothing.
        is_used = any(count and count != seen.uses.get(name) for name, count in uses.items())
        if is_used or self.busy(node, _NO_WISHES) is not None:
            seen.busy_s = now_s
        seen.uses = uses


def _presence(spec: NodeSpec) -> OwnerRule | None:
    """Somebody at a node keeps it awake for as long as it would have to be idle."""
    if spec.power is None:
        return None
    return OwnerRule(When.ACTIVE, Then.DRAIN, spec.power.suspend_after_s or _QUIET_S)
