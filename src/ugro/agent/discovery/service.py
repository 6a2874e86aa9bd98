"""Discovery: looks at the sources, lets candidates join, drains nodes that left, and removes them when they are idle.

``policy.nodes.discovery`` decides. What is decided is recorded before the inventory changes, so that a restarted agent
knows the same nodes, also while a source is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from ugro.agent.discovery.joining import Joining
from ugro.agent.discovery.watch import SourceWatch
from ugro.agent.ops.hosts import Hosts
from ugro.agent.support.change_signal import ChangeSignal
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.health import HealthCheck
from ugro.config.schema import Config
from ugro.core.discovery import Candidate, Discovered, Found, Member, Standing
from ugro.core.errors import NotAllowed
from ugro.core.finding import Finding
from ugro.core.node import NodeReport, NodeSpec
from ugro.nodes.discovery.candidates import Rules, merged, spec_of
from ugro.nodes.discovery.sources import sources_of
from ugro.policy.nodes import discovery as rules
from ugro.policy.nodes.discovery import Act, Situation, Step
from ugro.store.discovered import DiscoveredStore

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
# With `join: ask` nothing is watched, unless somebody has looked within this time.
_INTEREST_S = 60.0
_LONGEST_LOOK_S = 30.0
_MOST_AT_ONCE = 64  # logins
_SETTLED_S = 5.0  # the most that a submission waits for machines that may join


class Discovery:
    def __init__(self, store: DiscoveredStore, cluster: Cluster, health: HealthCheck, hosts: Hosts) -> None:
        self._store = store
        self._cluster = cluster
        self._health = health
        self._members: dict[str, Member] = {}
        self._joining = Joining(hosts, health)
        self._watches: list[SourceWatch] = []
        self._gone: set[str] = set()  # members that were removed; their drains are still recorded
        self._absent: dict[str, float] = {}  # members that no source lists, since when (monotonic)
        self._changed = ChangeSignal()
        self._asked_at = float("-inf")
        self._trying: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self.may_leave: Callable[[], bool] = lambda: True  # False while it is not certain which jobs run
        self.is_sleeping: Callable[[str], bool] = lambda name: False  # so no source has to list it
        # Nodes from which files are still to be fetched; gets those that may have checkpoints.
        self.uncollected: Callable[[set[str]], set[str]] = lambda unkept: unkept
        cluster.found = self._specs
        cluster.settled = self._settled
        hosts.found = self.candidate
        hosts.on_trusted = self.key_was_accepted

    async def load(self) -> None:
        """Before the first link is opened: jobs may run on nodes that joined by themselves."""
        self._members = {member.name: member for member in await self._store.open()}

    async def run(self) -> None:
        try:
            while True:
                seen = self._changed.count
                await self._watch_sources()
                await self._pass()
                await self._changed.wait(seen, _LOOK_EVERY_S)
        finally:
            await self._close()

    # --- what others ask -----------------------------------------------------------------------------------------

    async def look(self) -> Discovered:
        """What there is now: sources that look only now and then look first."""
        self._asked_at = time.monotonic()
        before = {id(watch) for watch in self._watches}
        await self._watch_sources()
        for watch in self._watches:
            if id(watch) in before:
                watch.look_again()
        limit_s = min(self._cluster.config.discovery.timeout + 1, _LONGEST_LOOK_S)
        await asyncio.gather(*(watch.answered(limit_s) for watch in self._watches))
        await self._pass()
        if self._trying is not None:
            await asyncio.wait([self._trying], timeout=_SETTLED_S)
        return Discovered(
            self._cluster.config.discovery.join,
            tuple(watch.state() for watch in self._watches),
            tuple(self._found()),
        )

    async def reports(self, names: Sequence[str]) -> AsyncGenerator[list[NodeReport]]:
        """What the machines are: those that are no nodes are reached only if their host keys are known."""
        new = [one.candidate for one in self._found() if one.standing is Standing.NEW and one.candidate.name in names]
        async with contextlib.aclosing(self._joining.reports(new, self._cluster.config)) as batches:
            async for batch in batches:
                yield batch

    async def candidate(self, name: str) -> NodeSpec | None:
        """Of a machine that is found and is no node. With `join: ask`, somebody may have looked long ago."""
        if not self._watches and self._cluster.config.discovery.has_sources:
            await self.look()
        found = self._candidates().get(name)
        return spec_of(found, self._cluster.config) if found is not None else None

    def refuse_resume(self, name: str) -> None:
        member = self._members.get(name)
        if member is not None and member.has_left:
            reason = rules.why_gone(member, self._situation(set())) or "was not listed a moment ago"
            raise NotAllowed(
                f"{reason}; it takes jobs again by itself once that changes",
                subject=name,
                hint=f"to keep it whatever is listed: ugro node discover --add {name}",
            )

    def refuse_removal(self, name: str) -> None:
        if name in self._members and name not in {spec.name for spec in self._cluster.config.nodes}:
            places = " and ".join(self._members[name].candidate.sources)
            raise NotAllowed(
                f"is not in the cluster file: it is listed by {places}",
                subject=name,
                hint=f"remove it there, or leave it out by discovery.match; to give it no jobs: ugro node drain {name}",
            )

    def key_was_accepted(self) -> None:
        self._joining.try_all_again()
        self._changed.notify()

    def findings(self) -> list[Finding]:
        return list(rules.judge_sources([watch.state() for watch in self._watches]))

    # --- the loop ------------------------------------------------------------------------------------------------

    def _specs(self, config: Config) -> Sequence[NodeSpec]:
        return [spec_of(member.candidate, config) for member in self._members.values()]

    async def _settled(self) -> None:
        """Every source has answered, and all that they list was tried; waits a few seconds at most."""
        if not self._cluster.config.discovery.adds_nodes:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLED_S):
                await self._watch_sources()
                await asyncio.gather(*(watch.answered(_SETTLED_S) for watch in self._watches))
                # Not ended halfway when the time is over.
                await asyncio.shield(asyncio.create_task(self._pass(), name="look at candidates"))
                if self._trying is not None:
                    await asyncio.wait([self._trying])

    async def _watch_sources(self) -> None:
        """Starts and ends watches as the configuration says."""
        async with self._changing:
            config = self._cluster.config
            section = config.discovery
            is_wanted = section.join == "auto" or time.monotonic() - self._asked_at < _INTEREST_S
            sources = sources_of(config, self._cluster.inventory.ssh_config) if is_wanted else ()
            of_all = self._rules
            kept = [watch for watch in self._watches if watch.source in sources and watch.rules == of_all]
            gone = [watch for watch in self._watches if watch not in kept]
            known = {watch.source: watch for watch in kept}
            self._watches = [
                known.get(source) or SourceWatch(source, of_all, self._changed.notify) for source in sources
            ]
            await asyncio.gather(*(watch.close() for watch in gone))

    async def _pass(self) -> None:
        async with self._changing:
            if self._members:
                await self._take_steps()
            if back := self._gone & {spec.name for spec in self._cluster.config.nodes}:
                await self._store.hand_over(back)
                self._gone -= back
        self._try_candidates()

    async def _take_steps(self) -> None:
        members, unsure = list(self._members.values()), self._unsure()
        self._absent = rules.absences(
            members, self._candidates(), unsure, self._absent, time.monotonic(), self._sleeping()
        )
        busy = await self._store.busy() | self.uncollected(await self._store.unkept())
        found = rules.steps(members, self._situation(busy))
        for step in found:
            await self._do(step)
        if found:
            await self._cluster.take_up_found()

    def _situation(self, busy: set[str]) -> Situation:
        section = self._cluster.config.discovery
        now = time.monotonic()
        return Situation(
            candidates=self._candidates(),
            sources={watch.source.name for watch in self._watches} if section.join == "auto" else (),
            unsure=self._unsure(),
            configured={spec.name for spec in self._cluster.config.nodes},
            busy=busy,
            answering={node.spec.name for node in self._cluster.inventory if node.link is not None},
            doubles=self._health.second_names(),
            absent_s={name: now - since for name, since in self._absent.items()},
            sleeping=self._sleeping(),
            leave_after_s=section.leave_after,
            may_leave=self.may_leave(),
        )

    async def _do(self, step: Step) -> None:
        if step.act is Act.HAND_OVER:
            await self._store.hand_over([step.name])
            del self._members[step.name]
        elif step.act is Act.PUT:
            assert step.candidate is not None
            await self._store.put(step.candidate)
            self._members[step.name] = Member(step.candidate)
        elif step.act is Act.LEAVE:
            await self._store.leave(step.name, step.reason)
            self._members[step.name] = Member(self._members[step.name].candidate, has_left=True)
        elif await self._store.remove(step.name):
            del self._members[step.name]
            self._gone.add(step.name)
        log.info("discovery: %s%s", step.act, f": {step.reason}" if step.reason else "", extra={"node": step.name})

    def _try_candidates(self) -> None:
        section = self._cluster.config.discovery
        is_trying = self._trying is not None and not self._trying.done()
        if section.join != "auto" or is_trying:
            return
        listed = self._candidates()
        self._joining.forget_all_but(listed)
        configured = self._cluster.config.nodes
        # Cut only here: machines that do not let us in, and rest, must not keep others from being tried.
        due = self._joining.due(rules.joinable(listed, self._members, configured, section.most))
        due = due[: min(section.most - len(self._members), _MOST_AT_ONCE)]
        if due:
            self._trying = asyncio.create_task(self._let_join(due), name=f"try {len(due)} candidates")
            self._trying.add_done_callback(self._note_tried)

    async def _let_join(self, candidates: Sequence[Candidate]) -> None:
        async with contextlib.aclosing(self._joining.able(candidates, self._cluster.config)) as able:
            async for candidate in able:
                async with self._changing:
                    await self._join(candidate)

    async def _join(self, candidate: Candidate) -> None:
        """Looks again first: much may have changed while it was tried."""
        section, configured = self._cluster.config.discovery, self._cluster.config.nodes
        listed = self._candidates().get(candidate.name)
        is_open = section.join == "auto" and listed is not None and listed.reach == candidate.reach
        if not is_open or not rules.joinable({candidate.name: candidate}, self._members, configured, section.most):
            return
        await self._store.put(candidate)
        self._members[candidate.name] = Member(candidate)
        log.info("discovery: joined, listed by %s", " and ".join(candidate.sources), extra={"node": candidate.name})
        await self._cluster.take_up_found()

    def _note_tried(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("trying candidates ended by an error", exc_info=bug)
        self._changed.notify()

    def _unsure(self) -> set[str]:
        """The sources that cannot be read now, or have not answered yet."""
        return {watch.source.name for watch in self._watches if not watch.is_current}

    def _sleeping(self) -> set[str]:
        """Not those that `match` leaves out: this is how to be rid of a node, also of one that never wakes."""
        return {name for name in self._members if self.is_sleeping(name) and self._rules.admit(name)}

    @property
    def _rules(self) -> Rules:
        section = self._cluster.config.discovery
        return Rules(section.match, section.user)

    def _candidates(self) -> dict[str, Candidate]:
        return merged(watch.checked for watch in self._watches)

    def _found(self) -> list[Found]:
        section, configured = self._cluster.config.discovery, self._cluster.config.nodes
        refusals = self._joining.refusals()
        if section.join == "auto" and len(self._members) >= section.most:
            full = f"not joined: {section.most} nodes have joined already (discovery.most)"
            refusals = {name: full for name in self._candidates()}
        return list(rules.found_nodes(self._candidates(), self._members, configured, refusals))

    async def _close(self) -> None:
        tasks = [self._trying] if self._trying is not None else []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(watch.close() for watch in self._watches))
        self._watches = []
