"""Power: looks at the nodes that may sleep, asks the rules, records their decision, and only then acts on it.

Decisions are made while no job can be placed, so that none starts on a node that goes to sleep. After a crash the
record says what was under way, and the node itself what became of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ugro.features.power import nodes as power
from ugro.features.power import rules as decision
from ugro.features.power.model import WOL, Act, PowerRecord, PowerReport, PowerRule, PowerState
from ugro.features.power.node.wake import Interface
from ugro.features.power.nodes import NodeLooks, Subject, performed
from ugro.features.power.operations import SuspendNode, WakeNode
from ugro.features.power.rules import HOUR_S, Kind, Situation, Step
from ugro.features.power.store import Known, PowerStore
from ugro.kernel.access.model import Caller
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput, Sleeping
from ugro.kernel.jobs.scheduling.model import Asleep
from ugro.kernel.jobs.scheduling.scheduler import NodeWishes, node_wishes
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.link import Link
from ugro.kernel.links.node import Node
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support import moments as clock
from ugro.kernel.support.aio import KeyedTasks
from ugro.kernel.support.errors import NotAllowed, UgroError, UsageError
from ugro.kernel.support.moments import Reading, boot_clock_s, place_s
from ugro.kernel.support.process import point

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_FACTOR = 20  # a pass over the queue takes at most so small a part of the time
_NONE = NodeWishes()
_HINTS = {
    Kind.AGENT: "power.suspend can be a command of yours",
    Kind.RULE: "see power.exclude in the cluster file, and: ugro node resume NODE",
}
_NOTHING = Known()


@dataclass(frozen=True, slots=True)
class _Memory:
    record: PowerRecord
    known: Known = _NOTHING


class Sleepers:
    """What is recorded of the power of nodes: which of them sleep."""

    def __init__(self, store: PowerStore, cluster: Cluster, reading: Callable[[], Reading]) -> None:
        self._store = store
        self._cluster = cluster
        self._reading = reading
        self.memories: dict[str, _Memory] = {}

    async def load(self) -> None:
        """Before the first job is placed."""
        self.memories = {name: _Memory(*found) for name, found in (await self._store.all()).items()}

    def report(self, name: str) -> PowerReport | None:
        """None: it has no rule."""
        if (found := self._find(name)) is None:
            return None
        rule, memory = found
        record, now_s = memory.record, boot_clock_s()
        again_s = 0.0
        if record.state is PowerState.ASLEEP:
            again_s = decision.again_in_s(self.situation(rule, memory), now_s)
        for_s = max(0.0, now_s - place_s(record.since, self._reading()))
        interface = memory.known.interface
        mac = rule.mac or (interface.mac if interface else "")
        return PowerReport(record.state, for_s, record.reason, record.problem or None, again_s or None, mac)

    def sleeping(self, name: str) -> Sleeping | None:
        """What the scheduler must know of a node that is not awake; None: it is."""
        found = self._find(name)
        if found is None or found[1].record.state is PowerState.AWAKE:
            return None
        rule, memory = found
        situation = self.situation(rule, memory)
        words = decision.refusal(situation, boot_clock_s())
        if memory.known.machine is None or memory.known.facts is None:
            words = words or f"is {memory.record.state}, and its hardware is not known yet"
        wakes_s = decision.wakes_in_s(situation)
        asleep = Asleep(memory.record.state, situation.since_s, wakes_s, rule.resume_timeout_s)
        return Sleeping(asleep, words, memory.known.machine, memory.known.facts)

    def is_sleeping(self, name: str) -> bool:
        """Whether it is away because of that, and expected back."""
        found = self._find(name)
        return found is not None and decision.is_sleeping(found[1].record.state, found[1].record.failures)

    def situation(self, rule: PowerRule, memory: _Memory) -> Situation:
        """As far as it is recorded."""
        record, by = memory.record, self._reading()
        return Situation(
            rule=rule,
            state=record.state,
            since_s=place_s(record.since, by),
            failures=record.failures,
            acts_s=tuple(place_s(at, by) for at in record.acts),
            took_s=record.took_s,
            problem=record.problem,
        )

    def _find(self, name: str) -> tuple[PowerRule, _Memory] | None:
        node, memory = self._cluster.inventory.find(name), self.memories.get(name)
        return (node.spec.power, memory) if node is not None and node.spec.power is not None and memory else None


class PowerService:
    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        engine: Engine,
        scheduler_input: SchedulerInput,
        sleepers: Sleepers,
        watch: RunTracker,
    ) -> None:
        self._store = store.power
        self._members = store.discovered
        self._cluster = cluster
        self._engine = engine
        self._input = scheduler_input
        self._sleepers = sleepers
        self._watch = watch
        # A node is heard when it has said what runs there since its link was opened: no job starts there before.
        self.looks = NodeLooks(cluster, engine, scheduler_input, lambda node: watch.silent_s(node) == 0)
        self._complaints: dict[str, str] = {}
        self._learned: dict[str, Link] = {}
        self._acted: set[str] = set()  # nodes whose act under way was begun by this process
        self._work = KeyedTasks(lambda: None)
        self._pass_at = 0.0
        self._wishes = _NONE

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._look()
                except UgroError as error:
                    log.error("cannot look after the power of nodes: %s", error)
                await asyncio.sleep(_LOOK_S)
        finally:
            await self._work.close()
            await self.looks.close()

    # --- what others ask -----------------------------------------------------------------------------------------

    async def why_not_removed(self, name: str) -> str | None:
        """What would be lost with a node, as words after its name."""
        if self._engine.live.has_jobs_on(name):
            return "has jobs"
        uncollected = self._watch.uncollected(await self._members.unkept())
        return "may have files of jobs that are not collected yet" if name in uncollected else None

    def findings(self) -> list[Finding]:
        """For ``ugro doctor``."""
        found = []
        for node in self._cluster.inventory:
            memory = self._sleepers.memories.get(node.spec.name)
            if node.spec.power is not None and memory is not None:
                found += _findings(node, memory)
        return found

    @answers(SuspendNode)
    async def suspend(self, asked: SuspendNode, caller: Caller) -> None:
        await self.request(asked.name, Act.SUSPEND)

    @answers(WakeNode)
    async def wake(self, asked: WakeNode, caller: Caller) -> None:
        await self.request(asked.name, Act.RESUME)

    async def request(self, name: str, act: Act) -> None:
        """Somebody asks for it. Raises NotAllowed if that would interrupt something."""
        node = self._cluster.inventory.named(name)
        if node.spec.power is None:
            raise UsageError("UGRO does not look after its power", subject=name, hint="give power in the cluster file")
        self._engine.safe_mode.check("and neither suspends nor wakes nodes")
        async with self._engine.scheduling:
            self.looks.note_jobs()
            memory = self._memory(name)
            if act is Act.SUSPEND:
                step = self._suspend_by_hand(node, memory, await self._pass())
            elif memory.record.state is PowerState.AWAKE:
                raise NotAllowed("it is awake", subject=name)
            elif memory.record.state is PowerState.GOING_TO_SLEEP:
                # Its link may still be open: it would count as awake, and get jobs, until it falls asleep.
                raise NotAllowed("it is going to sleep", subject=name, hint="wake it when it is asleep: ugro node ls")
            else:
                step = Step(PowerState.WAKING, "asked for", Act.RESUME)
            await self._take(node, memory, step)

    def _suspend_by_hand(self, node: Node, memory: _Memory, wishes: NodeWishes) -> Step:
        name = node.spec.name
        if memory.record.state is not PowerState.AWAKE or node.link is None:
            raise NotAllowed("it is not awake", subject=name, hint="see: ugro node ls")
        if (busy := self.looks.busy(node, wishes)) is not None:
            raise NotAllowed(f"it {busy.words}", subject=name, hint=_HINTS.get(busy.kind, "wait until that is over"))
        return Step(PowerState.GOING_TO_SLEEP, "asked for", Act.SUSPEND)

    # --- the look ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        nodes = [node for node in self._cluster.inventory if node.spec.power is not None]
        await self._forget({node.spec.name for node in nodes})
        if not nodes:
            return
        self.looks.keep_up(nodes, self._watch.uncollected(await self._members.unkept()))
        for node in nodes:
            await self._learn(node)
        if self._engine.safe_mode.is_on:
            return
        async with self._engine.scheduling:
            self.looks.note_jobs()  # from here on none is placed
            wishes = await self._pass_when_due(nodes)
            for node in nodes:
                memory = self._memory(node.spec.name)
                step = decision.decide(self._situation(node, memory, wishes), boot_clock_s())
                if step is not None:
                    await self._take(node, memory, step)
                self._attend(node)

    async def _forget(self, members: set[str]) -> None:
        """What has no rule any more is awake, or unreachable."""
        for name in [name for name in self._sleepers.memories if name not in members]:
            del self._sleepers.memories[name]
            self._learned.pop(name, None)
            self._work.cancel(("act", name))
            await self._store.forget(name)
            if (node := self._cluster.inventory.find(name)) is not None:
                node.is_resting = False

    async def _pass_when_due(self, nodes: list[Node]) -> NodeWishes:
        """Who is wanted: only looked for while that makes a difference."""
        is_of_use = any(
            self._memory(node.spec.name).record.state is not PowerState.AWAKE or self.looks.may_sleep(node)
            for node in nodes
        )
        if not is_of_use:
            self._wishes = _NONE
        elif time.monotonic() >= self._pass_at or any(self.looks.may_sleep(node) for node in nodes):
            self._wishes = await self._pass()
        return self._wishes

    async def _pass(self) -> NodeWishes:
        begun = time.monotonic()
        wishes = node_wishes(await self._input.take(self._engine.live), self._engine.live.queue)
        self._pass_at = time.monotonic() + _FACTOR * (time.monotonic() - begun)
        return wishes

    def _situation(self, node: Node, memory: _Memory, wishes: NodeWishes) -> Situation:
        name = node.spec.name
        assert node.spec.power is not None
        seen, busy = self.looks.of(node), self.looks.busy(node, wishes)
        return replace(
            self._sleepers.situation(node.spec.power, memory),
            linked_s=seen.linked_s,
            silent_s=seen.silent_s,
            is_lost=node.link is None and node.error is not None,
            busy=busy.words if busy is not None else None,
            idle_s=seen.idle_s,
            wanted_by=wishes.wakes.get(name, ()),
            holders=self.looks.holders(name),
            complaint=self._complaints.get(name),
        )

    async def _take(self, node: Node, memory: _Memory, step: Step) -> None:
        """Recorded before it is done."""
        name = node.spec.name
        record = _after(memory.record, step)
        await self._store.put(name, record, f"{step.state}: {step.problem or step.reason}")
        point("power.recorded")
        level = logging.WARNING if step.problem else logging.INFO
        log.log(level, "%s: %s", step.state, step.problem or step.reason, extra={"node": name})
        self._sleepers.memories[name] = replace(memory, record=record)
        self._complaints.pop(name, None)
        self._work.cancel(("act", name))
        self._acted.discard(name)
        self.looks.changed(name)
        self._input.reports.look_again(name)
        self._engine.wake()

    def _attend(self, node: Node) -> None:
        """Does what was recorded, also by an agent before this one; and dials as the state asks for."""
        name, state = node.spec.name, self._memory(node.spec.name).record.state
        node.is_resting = state is PowerState.ASLEEP
        if state is PowerState.WAKING:
            self._begin(node, Act.RESUME)
            node.wake()
        elif state is PowerState.GOING_TO_SLEEP and self.looks.of(node).was_linked_before(self._since_s(name)):
            self._begin(node, Act.SUSPEND)

    def _begin(self, node: Node, act: Act) -> None:
        name = node.spec.name
        if name in self._acted or ("act", name) in self._work or node.spec.power is None:
            return  # the act before this one may still be ending
        self._acted.add(name)
        interface = self._memory(name).known.interface
        subject = Subject(node, node.spec.power, interface, partial(self._neighbours, interface), self._folder)
        self._work.do(("act", name), partial(performed, act, subject, partial(self._complaints.__setitem__, name)))

    def _neighbours(self, interface: Interface | None) -> list[Link]:
        """Links of nodes that are awake in the same network."""
        if interface is None or not interface.broadcast:
            return []
        found = ((node.link, self._sleepers.memories.get(node.spec.name)) for node in self._cluster.inventory)
        return [
            link
            for link, memory in found
            if link is not None
            and memory is not None
            and memory.known.interface is not None
            and memory.known.interface.broadcast == interface.broadcast
        ]

    async def _learn(self, node: Node) -> None:
        """Once for each link: what it is, for the time in which it cannot be asked."""
        name, link = node.spec.name, node.link
        facts = self._input.facts(node)
        if link is None or facts is None or self._learned.get(name) is link:
            return
        self._learned[name] = link
        self._work.do(("learn", name), partial(self._ask, node, link))

    async def _ask(self, node: Node, link: Link) -> None:
        name = node.spec.name
        try:
            found = await power.interface(link)
            known = Known(link.machine, self._input.facts(node), found if found.mac else None)
            await self._store.learn(name, self._memory(name).record, known)
        except UgroError as error:
            log.warning("what it is cannot be kept: %s", error, extra={"node": name})
            return
        memory = self._memory(name)
        before = memory.known
        kept = Known(known.machine, known.facts or before.facts, known.interface or before.interface)
        self._sleepers.memories[name] = replace(memory, known=kept)

    def _memory(self, name: str) -> _Memory:
        if name not in self._sleepers.memories:
            self._sleepers.memories[name] = _Memory(PowerRecord(PowerState.AWAKE, clock.now()))
        return self._sleepers.memories[name]

    def _since_s(self, name: str) -> float:
        return place_s(self._memory(name).record.since, self._reading)

    @property
    def _reading(self) -> Reading:
        return self._input.clock.reading()

    @property
    def _folder(self) -> Path:
        return self._cluster.path.parent if self._cluster.path else Path("/")


def _after(before: PowerRecord, step: Step) -> PowerRecord:
    now = clock.now()
    acts = tuple(at for at in before.acts if at.boot_id != now.boot_id or now.boot_s - at.boot_s < HOUR_S)[-100:]
    is_settled = step.state in (PowerState.AWAKE, PowerState.ASLEEP)
    failures = before.failures + 1 if step.problem else 0 if is_settled else before.failures
    problem = step.problem or ("" if is_settled else before.problem)
    return PowerRecord(
        step.state,
        now,
        step.reason,
        step.jobs,
        problem,
        failures,
        (*acts, now) if step.act is not None else acts,
        step.took_s if step.took_s is not None else before.took_s,
    )


def _findings(node: Node, memory: _Memory) -> list[Finding]:
    name, record, interface = node.spec.name, memory.record, memory.known.interface
    found = []
    if record.problem:
        is_asleep = record.state is PowerState.ASLEEP
        remedy = f"try it by hand: ugro node wake {name}" if is_asleep else "see: ugro agent logs"
        found.append(Finding(name, "power", Grade.WARNING, record.problem, remedy))
    assert node.spec.power is not None
    if node.spec.power.resume != WOL:
        return found
    if not node.spec.power.mac and (interface is None or not interface.mac):
        text = "its MAC address is not known, so it cannot be woken by a packet"
        found.append(Finding(name, "power", Grade.WARNING, text, f"give power: {{mac: …}} for {name}"))
    elif interface is not None and interface.wake == "disabled":
        text = f"its interface {interface.name} does not wake it"
        found.append(Finding(name, "power", Grade.WARNING, text, f"on that node: ethtool -s {interface.name} wol g"))
    return found
