"""Who uses the nodes besides us: one watch for each node whose rule says to look for its owner.

Nodes push what changes. What a node said last is kept while it cannot be reached, and grows old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from ugro.features.power import rules as owner
from ugro.features.power.model import OwnerReport, OwnerRule, Then
from ugro.features.power.node import presence
from ugro.features.power.rules import Part, Seen, judge
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import Ending, Job
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.links.calls import asked
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import NodeSpec
from ugro.kernel.links.node import Node
from ugro.kernel.support.aio import ChangeSignal, KeyedTasks
from ugro.kernel.support.errors import NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.support.moments import boot_clock_s
from ugro.kernel.support.quantities import format_duration
from ugro.node import foreign

# --- presence ---------------------------------------------------------------------------------------------------------
# Whether somebody uses a node's machine, as its node program says. Everything that it says is bounded.


_MOST_S = 2.0**32  # longer than any machine was up
_MOST_LINE = 65536
_MOST_TEXT = 200
_MOST_TEXTS = 16


@dataclass(frozen=True, slots=True)
class Presence:
    idle_s: float | None  # since the last sign; None: there was none since the machine started
    sign: str = ""
    sources: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()


async def watch(node: Node, rule: OwnerRule, connect_s: float) -> AsyncGenerator[Presence]:
    """What is so now, then every change, until the link is lost."""
    link = await node.ready(connect_s, patiently=True)
    stream = link.stream(*asked(presence.watch, when=rule.when.value, quiet_s=rule.quiet_s))
    unread = b""
    try:
        async for _, payload in stream:
            *lines, unread = (unread + payload).split(b"\n")
            if len(unread) > _MOST_LINE:
                raise RemoteFailure("invalid report on its owner: it has no end", subject=node.spec.name)
            for line in lines:
                yield parse(line, node.spec.name)
        await stream.result()
    finally:
        stream.cancel()


def parse(line: bytes, node: str) -> Presence:
    try:
        found = foreign.parsed(line)
        idle_s = found["idle_s"]
        if idle_s is not None:
            idle_s = float(idle_s)
            if not 0 <= idle_s < _MOST_S:  # also refuses NaN
                raise ValueError(f"idle for {idle_s} s")
        return Presence(idle_s, _text(found.get("sign", "")), _texts(found.get("sources")), _texts(found.get("blind")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RemoteFailure(f"invalid report on its owner: {error!r:.200}", subject=node) from error


def _texts(found: Any) -> tuple[str, ...]:
    return tuple(_text(one) for one in list(found or ())[:_MOST_TEXTS])


def _text(found: Any) -> str:
    """Names of users, devices and processes are in it: on a terminal they must not be more than text."""
    text = str(found)[:_MOST_TEXT]
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


# --- owners -----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_AGAIN_S = 0.5
_LONGEST_AGAIN_S = 5.0

Note = Callable[[str, str], Awaitable[None]]  # gets a node's name and a sentence
RuleOf = Callable[[NodeSpec], OwnerRule | None]


class Owners:
    def __init__(self, cluster: Cluster, note: Note | None, rule_of: RuleOf = attrgetter("owner")) -> None:
        """``note`` records what has changed, for people; None: they are not told."""
        self._cluster = cluster
        self._note = note
        self._rule_of = rule_of
        self._watches: dict[str, _Watch] = {}
        self._listeners: list[Callable[[str], None]] = []
        self.changed = ChangeSignal()  # the owner of some node came, or was quiet for long enough

    def listen(self, on_news: Callable[[str], None]) -> None:
        """``on_news``: the owner of a node came, or was quiet for long enough."""
        self._listeners.append(on_news)

    def keep_up(self) -> None:
        """Looks for the owners that the configuration names now, and for no others."""
        rules = ((node, self._rule_of(node.spec)) for node in self._cluster.inventory)
        wanted = {node.spec.name: (node, rule) for node, rule in rules if rule is not None}
        for name, watch in list(self._watches.items()):
            if wanted.get(name) != (watch.node, watch.rule) or watch.task.done():
                self._watches.pop(name).task.cancel()
        for name, (node, rule) in wanted.items():
            if name not in self._watches:
                self._watches[name] = _Watch(node, rule, self._note, self._tell)

    def _tell(self, node: str) -> None:
        self.changed.notify()
        for on_news in self._listeners:
            on_news(node)

    async def close(self) -> None:
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.task.cancel()
        await asyncio.gather(*(watch.task for watch in watches.values()), return_exceptions=True)

    def report(self, node: str) -> OwnerReport | None:
        """None: nobody is looked for there."""
        watch = self._watches.get(node)
        return watch.report() if watch else None

    def heard(self) -> dict[str, OwnerReport]:
        """Of the nodes that would say if it changed."""
        return {name: watch.report() for name, watch in self._watches.items() if watch.seen.is_open}

    def objections(self) -> dict[str, str]:
        """By node, why no new job starts there. One that cannot be reached has a better reason."""
        linked = [watch for watch in self._watches.values() if watch.node.link is not None]
        found = ((watch.node.spec.name, watch.report().words) for watch in linked)
        return {name: words for name, words in found if words is not None}


def owners_of(cluster: Cluster, jobs: JobStore) -> Owners:
    return Owners(cluster, lambda node, text: jobs.note("owner", text, node=node))


class _Watch:
    def __init__(self, node: Node, rule: OwnerRule, note: Note | None, on_news: Callable[[str], None]) -> None:
        self.node = node
        self.rule = rule
        self.seen = Seen()
        self._note = note
        self._on_news = on_news
        self._has_news = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"look for the owner of {node.spec.name}")

    def report(self) -> OwnerReport:
        return judge(self.rule, self.seen, boot_clock_s())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="listen")
            group.create_task(self._tell(), name="tell")

    async def _listen(self) -> None:
        pause_s = _AGAIN_S
        while True:
            try:
                async with contextlib.aclosing(watch(self.node, self.rule, _CONNECT_S)) as news:
                    async for found in news:
                        self._take(found)
                        pause_s = _AGAIN_S
            except (Unreachable, TimedOut):
                # Somebody may come meanwhile: no job starts there before it has said whether.
                self._change(replace(self.seen, is_known=False, is_open=False))
            except UgroError as error:
                if self.seen.error != str(error):  # each once: it is tried again and again
                    log.error("cannot look for its owner: %s", error, extra={"node": self.node.spec.name})
                self._change(replace(self.seen, is_known=True, is_open=False, error=str(error)))
            else:
                self._change(replace(self.seen, is_open=False))
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_AGAIN_S, pause_s * 2)

    def _take(self, found: Presence) -> None:
        last_s = None if found.idle_s is None else boot_clock_s() - found.idle_s
        if self.seen.last_s is not None:  # what was seen, was: also if the node has forgotten it
            last_s = max(self.seen.last_s, last_s) if last_s is not None else self.seen.last_s
        self._change(Seen(last_s, found.sign or self.seen.sign, True, True, found.sources, found.blind))

    def _change(self, seen: Seen) -> None:
        self.seen = seen
        self._has_news.set()

    async def _tell(self) -> None:
        """Every coming and going, once."""
        name, before, was_there = self.node.spec.name, self.report(), False
        while True:
            now = self.report()
            if now.is_known and now.is_there != was_there:
                was_there = now.is_there
                await self._record(name, now)
            if (now.is_known, now.is_there) != (before.is_known, before.is_there):
                before = now
                self._on_news(name)
            self._has_news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._left_s()):
                    await self._has_news.wait()

    def _left_s(self) -> float | None:
        """Until the owner counts as gone."""
        report = self.report()
        return max(0.01, report.quiet_s - (report.idle_s or 0.0)) if report.is_there else None

    async def _record(self, name: str, now: OwnerReport) -> None:
        if self._note is None:
            return
        text = f"it was quiet for {format_duration(now.quiet_s)}: its owner is gone, and it takes jobs again"
        if now.words is not None:
            text = f"it {now.words}"
        log.info("%s", text, extra={"node": name})
        try:
            await self._note(name, text)
        except UgroError as error:
            log.error("cannot be written down now: %s", error)


# --- owner requests ---------------------------------------------------------------------------------------------------
# What jobs do for the owners of their machines: they make way with a checkpoint, or take a smaller share.


_OWNER_REQUESTS_AGAIN_S = 5.0


class OwnerRequests:
    def __init__(self, jobs: JobStore, watch: RunTracker, owners: Owners, work: KeyedTasks) -> None:
        self._jobs = jobs
        self._watch = watch
        self._owners = owners
        self._work = work
        # What was asked of the ranks last. After a restart all are asked again: nobody knows what the last agent asked.
        self._asked: dict[tuple[int, int, str], Part] = {}

    def look(self, holding: Sequence[Job]) -> list[Awaitable[Job]]:
        """Starts what takes its time in the background; returns the requests to record."""
        owners = self._owners.heard()
        if not owners and not self._asked:
            return []
        self._ask_for_parts(holding, list(owner.parts(holding, owners)))
        return [self._jobs.ask_to_end(stop.job.id, Ending.OWNER) for stop in owner.stops(holding, owners)]

    def why(self, job: Job) -> str | None:
        """Whose machine a job has made way for, while that can be said."""
        if job.ending is not Ending.OWNER or job.placement is None:
            return None
        reports = ((name, self._owners.report(name)) for name in job.placement.node_names)
        return next((owner.makes_way(name, one) for name, one in reports if one is not None and one.is_there), None)

    def _ask_for_parts(self, holding: Sequence[Job], wanted: list[Part]) -> None:
        alive = {(job.id, job.attempt): job for job in holding}
        self._asked = {key: one for key, one in self._asked.items() if key[:2] in alive}
        for one in [*wanted, *self._restored(alive, wanted)]:
            key = (one.job.id, one.job.attempt, one.node)
            if key not in self._asked or self._asked[key].part != one.part:
                self._work.do(("part", *key), partial(self._ask, one))

    def _restored(self, alive: dict[tuple[int, int], Job], wanted: list[Part]) -> list[Part]:
        """Where shares were small and the rule is another one now, they are no longer."""
        kept = {(one.job.id, one.job.attempt, one.node) for one in wanted}
        return [
            replace(one, job=alive[key[:2]], part=1.0)
            for key, one in self._asked.items()
            if key not in kept and not self._shrinks(key[2])
        ]

    def _shrinks(self, login: str) -> bool:
        report = self._owners.report(node_of(login))
        return report is not None and report.then is Then.SHRINK

    async def _ask(self, one: Part) -> None:
        job, node = one.job, one.node
        try:
            await self._watch.runs(node).take_part(job.id, job.attempt, one.part, binds_cores=one.is_of_cores)
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            log.warning("its share cannot be changed yet: %s", error, extra={"job": job.id, "node": node})
            await asyncio.sleep(_OWNER_REQUESTS_AGAIN_S)
            return
        before = self._asked.get((job.id, job.attempt, node))
        self._asked[job.id, job.attempt, node] = one
        if one.part < 1 or (before is not None and before.part < 1):
            await self._jobs.note("owner", owner.takes(one), job=job, node=node)
