"""Discovery: looks at the sources, lets candidates join, drains nodes that left, and removes them when they are idle.

``rules`` decide. What is decided is recorded before the inventory changes, so that a restarted agent
knows the same nodes, also while a source is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ugro.features.discovery import rules
from ugro.features.discovery.candidates import Rules, SourceWatch, merged, spec_of
from ugro.features.discovery.config import DiscoverySection
from ugro.features.discovery.model import Candidate, Discovered, Found, Member, Standing
from ugro.features.discovery.operations import (
    ListDiscoveredMachines,
    ListSshHosts,
    ReadClusterFile,
    ReportDiscoveredMachines,
    WriteClusterFile,
)
from ugro.features.discovery.rules import Act, Situation, Step
from ugro.features.discovery.sources import sources_of, ssh_config_hosts
from ugro.features.discovery.store import DiscoveredStore
from ugro.kernel.access.model import Caller
from ugro.kernel.agent.model import ClusterFacts, ClusterFileWish, Destination, Finding, KnownHost, NewHost
from ugro.kernel.config.allowance import Allowances, Effects, allow, keep_allowed
from ugro.kernel.config.edit import add_node, write_atomically
from ugro.kernel.config.load import parse_config, read_text
from ugro.kernel.config.schema import Config
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.host_keys import Examiner
from ugro.kernel.links.model import NodeReport, NodeSpec, Status
from ugro.kernel.links.reports import HealthCheck
from ugro.kernel.links.rules import Sighting, is_same_machine
from ugro.kernel.operations.request import answers
from ugro.kernel.support.aio import ChangeSignal, wait_for_any
from ugro.kernel.support.errors import NotAllowed
from ugro.kernel.support.moments import delay_s

# --- joining ----------------------------------------------------------------------------------------------------------
# Tries candidates: opens a link to each, which ssh refuses unless the host key is one that the user has accepted.
#
# A candidate that cannot join is tried again after a growing pause: too many failed logins get an address banned.


_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 900.0


@dataclass(frozen=True, slots=True)
class _Try:
    candidate: Candidate
    failures: int
    again_at: float  # monotonic
    refusal: str  # why it did not join


class Joining:
    def __init__(self, examiner: Examiner, health: HealthCheck) -> None:
        self._examiner = examiner
        self._health = health
        self._tries: dict[str, _Try] = {}

    def refusals(self) -> dict[str, str]:
        return {name: one.refusal for name, one in self._tries.items()}

    def due(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those to be tried now: new ones, those that have changed, and those whose pause is over."""
        now = time.monotonic()
        return [one for one in candidates if (last := self._last(one)) is None or last.again_at <= now]

    def try_all_again(self) -> None:
        """A key was accepted."""
        self._tries = {name: replace(one, again_at=float("-inf")) for name, one in self._tries.items()}

    def forget_all_but(self, names: Collection[str]) -> None:
        self._tries = {name: one for name, one in self._tries.items() if name in names}

    async def reports(self, candidates: Sequence[Candidate], config: Config) -> AsyncGenerator[list[NodeReport]]:
        """What each of them is; ``same_as`` names the node that is the same machine."""
        specs = [spec_of(one, config) for one in candidates]
        async with contextlib.aclosing(self._examiner.examine(specs)) as batches:
            async for batch in batches:
                yield [replace(report, same_as=self._node_of(report)) for report in batch]

    async def able(self, candidates: Sequence[Candidate], config: Config) -> AsyncGenerator[Candidate]:
        """Tries them, and yields those that can join."""
        by_name = {one.name: one for one in candidates}
        async with contextlib.aclosing(self.reports(candidates, config)) as batches:
            async for batch in batches:
                for report in batch:
                    candidate = by_name[report.name]
                    if (refusal := refusal_of(report)) is None:
                        self._tries.pop(report.name, None)
                        yield candidate
                    else:
                        self._note(candidate, refusal)

    def _last(self, candidate: Candidate) -> _Try | None:
        known = self._tries.get(candidate.name)
        return known if known is not None and known.candidate.reach == candidate.reach else None

    def _note(self, candidate: Candidate, refusal: str) -> None:
        last = self._last(candidate)
        failures = (last.failures if last else 0) + 1
        pause_s = delay_s(failures, random.random(), base_s=_FIRST_PAUSE_S, cap_s=_LONGEST_PAUSE_S)
        self._tries[candidate.name] = _Try(candidate, failures, time.monotonic() + pause_s, refusal)

    def _node_of(self, report: NodeReport) -> str | None:
        if report.machine is None or report.facts is None:
            return None
        gpus = frozenset(gpu.uuid for gpu in report.facts.gpus if gpu.uuid)
        own = Sighting(report.name, report.machine, gpus)
        nodes = self._health.sightings(lambda node: False)
        return next((node.name for node in nodes if node.name != own.name and is_same_machine(own, node)), None)


def refusal_of(report: NodeReport) -> str | None:
    """Why a candidate cannot join; None if it can: it has answered over a link, so its host key is known."""
    if report.cause == "host-key-unknown":
        return f"host key not accepted: ugro node trust {report.name}"
    if report.status is Status.UNREACHABLE:
        return report.error or "is unreachable"
    return f"the same machine as {report.same_as}" if report.same_as else None


# --- service ----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
# With `join: ask` nothing is watched, unless somebody has looked within this time.
_INTEREST_S = 60.0
_LONGEST_LOOK_S = 30.0
_MOST_AT_ONCE = 64  # logins
_SETTLED_S = 5.0  # the most that a submission waits for machines that may join


class Members:
    """The nodes that joined by themselves."""

    def __init__(self, store: DiscoveredStore) -> None:
        self.store = store
        self.by_name: dict[str, Member] = {}

    async def load(self) -> None:
        """Before the first link is opened: jobs may run on them."""
        self.by_name.update((member.name, member) for member in await self.store.open())

    def specs(self, config: Config) -> Sequence[NodeSpec]:
        return [spec_of(member.candidate, config) for member in self.by_name.values()]


@dataclass(frozen=True, slots=True)
class Ties:
    """What keeps a node in the cluster that no source lists any more."""

    may_leave: Callable[[], bool]  # False while it is not certain which jobs run
    is_sleeping: Callable[[str], bool]  # so no source has to list it
    # Nodes from which files are still to be fetched; gets those that may have checkpoints.
    uncollected: Callable[[set[str]], set[str]]


class Discovery:
    def __init__(
        self, members: Members, cluster: Cluster, health: HealthCheck, examiner: Examiner, ties: Ties
    ) -> None:
        self._store = members.store
        self._cluster = cluster
        self._health = health
        self._ties = ties
        self._members = members.by_name
        self._joining = Joining(examiner, health)
        self._trusted = examiner.trusted
        self._trusted_seen = 0
        self._watches: list[SourceWatch] = []
        self._gone: set[str] = set()  # members that were removed; their drains are still recorded
        self._absent: dict[str, float] = {}  # members that no source lists, since when (monotonic)
        self._changed = ChangeSignal()
        self._asked_at = float("-inf")
        self._trying: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    async def run(self) -> None:
        try:
            while True:
                seen = {signal: signal.count for signal in (self._changed, self._trusted)}
                await self._watch_sources()
                await self._pass()
                await wait_for_any(seen, _LOOK_EVERY_S)
        finally:
            await self._close()

    # --- what others ask -----------------------------------------------------------------------------------------

    @answers(ListDiscoveredMachines)
    async def list_machines(self, asked: ListDiscoveredMachines, caller: Caller) -> Discovered:
        return await self.look()

    async def look(self) -> Discovered:
        """What there is now: sources that look only now and then look first."""
        self._asked_at = time.monotonic()
        before = {id(watch) for watch in self._watches}
        await self._watch_sources()
        for watch in self._watches:
            if id(watch) in before:
                watch.look_again()
        limit_s = min(self._cluster.config.section(DiscoverySection).timeout + 1, _LONGEST_LOOK_S)
        await asyncio.gather(*(watch.answered(limit_s) for watch in self._watches))
        await self._pass()
        if self._trying is not None:
            await asyncio.wait([self._trying], timeout=_SETTLED_S)
        return Discovered(
            self._cluster.config.section(DiscoverySection).join,
            tuple(watch.state() for watch in self._watches),
            tuple(self._found()),
        )

    @answers(ReportDiscoveredMachines)
    async def reports(self, asked: ReportDiscoveredMachines, caller: Caller) -> AsyncGenerator[list[NodeReport]]:
        """What the machines are: those that are no nodes are reached only if their host keys are known."""
        found = [one.candidate for one in self._found() if one.standing is Standing.NEW]
        return self._joining.reports([one for one in found if one.name in asked.node], self._cluster.config)

    @answers(ListSshHosts)
    async def ssh_hosts(self, asked: ListSshHosts, caller: Caller) -> tuple[str, ...]:
        own = self._cluster.config.ssh.config_file
        return tuple(ssh_config_hosts(Path(asked.ssh_config or own or "~/.ssh/config")))

    async def candidate(self, name: str) -> NodeSpec | None:
        """Of a machine that is found and is no node. With `join: ask`, somebody may have looked long ago."""
        if not self._watches and self._cluster.config.section(DiscoverySection).has_sources:
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

    def findings(self) -> list[Finding]:
        return list(rules.judge_sources([watch.state() for watch in self._watches]))

    # --- the loop ------------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Every source has answered, and all that they list was tried; waits a few seconds at most."""
        if not self._cluster.config.section(DiscoverySection).adds_nodes:
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
            section = config.section(DiscoverySection)
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
        busy = await self._store.busy() | self._ties.uncollected(await self._store.unkept())
        found = rules.steps(members, self._situation(busy))
        for step in found:
            await self._do(step)
        if found:
            await self._cluster.take_up_found()

    def _situation(self, busy: set[str]) -> Situation:
        section = self._cluster.config.section(DiscoverySection)
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
            may_leave=self._ties.may_leave(),
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
        section = self._cluster.config.section(DiscoverySection)
        is_trying = self._trying is not None and not self._trying.done()
        if section.join != "auto" or is_trying:
            return
        listed = self._candidates()
        if self._trusted.count != self._trusted_seen:
            self._trusted_seen = self._trusted.count
            self._joining.try_all_again()
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
        section, configured = self._cluster.config.section(DiscoverySection), self._cluster.config.nodes
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
        return {name for name in self._members if self._ties.is_sleeping(name) and self._rules.admit(name)}

    @property
    def _rules(self) -> Rules:
        section = self._cluster.config.section(DiscoverySection)
        return Rules(section.match, section.user)

    def _candidates(self) -> dict[str, Candidate]:
        return merged(watch.checked for watch in self._watches)

    def _found(self) -> list[Found]:
        section, configured = self._cluster.config.section(DiscoverySection), self._cluster.config.nodes
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


# --- cluster files ----------------------------------------------------------------------------------------------------
# The cluster file that ``ugro init`` writes: a new one, or an existing one with more nodes.


class ClusterFiles:
    def __init__(self, allowances: Allowances) -> None:
        self._allowances = allowances

    @answers(ReadClusterFile)
    async def read(self, asked: ReadClusterFile, caller: Caller) -> ClusterFacts:
        return await asyncio.to_thread(read, Path(asked.path))

    @answers(WriteClusterFile)
    async def write(self, asked: WriteClusterFile, caller: Caller) -> None:
        await asyncio.to_thread(write, Path(asked.path), asked.wish, self._allowances)


def read(path: Path) -> ClusterFacts:
    """The file alone, without the environment."""
    config = parse_config(read_text(path), path, {})
    file = config.ssh.config_file
    return ClusterFacts(
        tuple(
            KnownHost(node.name, Destination(node.host or node.name, node.user, node.port))
            for node in config.nodes
            if node.transport == "ssh"
        ),
        any(node.transport == "local" for node in config.nodes),
        os.path.abspath(os.path.expanduser(file)) if file else None,
    )


def write(path: Path, wish: ClusterFileWish, allowances: Allowances) -> None:
    """Writes a new file, or adds hosts to one; everything that is in it stays as it is.

    A new one is the user's own, and allowed by that; another one stays allowed if it was.
    """
    if wish.is_new:
        text = new_text(wish)
        write_atomically(path, text)
        allow(allowances, Effects.of(text, path))
        return
    before = read_text(path)
    edited = with_hosts(before, path, parse_config(before, path, {}).nodes, wish)
    if edited != before:
        keep_allowed(allowances, path, before, edited)
        write_atomically(path, edited)


def new_text(wish: ClusterFileWish) -> str:
    """A further name for a machine becomes a comment."""
    names: set[str] = set()
    distinct = [host for host in wish.hosts if host.same_as is None]
    lines = ["# The machines of this cluster. Edit it at any time: the agent reads changes by itself.", "nodes:"]
    if wish.has_local or not distinct:
        name = _unique(os.uname().nodename, names)
        lines.append(f"  {name}: {{transport: local, role: master}}  # this machine")
    lines += [f"  {_entry(host, names)}" for host in distinct]
    second = [f"{host.word}: the same machine as {host.same_as}" for host in wish.hosts if host.same_as]
    lines += [f"  # {_on_one_line(text)}" for text in second]
    if wish.ssh_config:
        lines += ["ssh:", f"  config_file: {json.dumps(wish.ssh_config)}"]
    return "\n".join(lines) + "\n"


def with_hosts(text: str, path: Path, known: Sequence[NodeSpec], wish: ClusterFileWish) -> str:
    names = {node.name for node in known}
    if wish.has_local and not any(node.transport == "local" for node in known):
        text = add_node(text, _unique(os.uname().nodename, names), {"transport": "local"}, file=str(path))
    for host in wish.hosts:
        if host.same_as is None:
            name, fields = _node(host.word, names)
            text = add_node(text, name, fields, file=str(path))
    return text


def _entry(host: NewHost, names: set[str]) -> str:
    name, fields = _node(host.word, names)
    text = ", ".join(f"{key}: {json.dumps(value)}" for key, value in fields.items())
    return f"{name}:" + (f" {{{text}}}" if text else "") + f"  # {_on_one_line(host.remark)}"


def _node(word: str, names: set[str]) -> tuple[str, dict[str, object]]:
    """A name that is not taken yet, and the fields that the file needs."""
    to = Destination.parse(word)
    name = _unique(to.host, names)
    fields = {"host": to.host if name != to.host else None, "user": to.user, "port": to.port}
    return name, {key: value for key, value in fields.items() if value is not None}


def _on_one_line(text: str) -> str:
    """A comment ends with its line, and YAML allows no control characters in it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in re.sub(r"\s+", " ", text))


def _unique(host: str, names: set[str]) -> str:
    """A node name made from a host name; no name is used twice."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip("-._")[:50] or "node"
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", base):  # a number to other readers of YAML
        base = f"node-{base}"
    name, number = base, 2
    while name in names:
        name, number = f"{base}-{number}", number + 1
    names.add(name)
    return name
