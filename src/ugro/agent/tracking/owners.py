"""Who uses the nodes besides us: one watch for each node whose rule says to look for its owner.

Nodes push what changes. What a node said last is kept while it cannot be reached, and grows old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from operator import attrgetter

from ugro.agent.tracking.cluster import Cluster
from ugro.core.errors import TimedOut, UgroError, Unreachable
from ugro.core.node import NodeSpec
from ugro.core.owner import OwnerReport, OwnerRule
from ugro.core.support.clock import boot_clock_s
from ugro.core.support.quantity import format_duration
from ugro.nodes import presence
from ugro.nodes.node import Node
from ugro.nodes.presence import Presence
from ugro.policy.nodes.owner import Seen, judge

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
        self.on_news: Callable[[str], None] = lambda node: None  # an owner came, or was quiet for long enough

    def keep_up(self) -> None:
        """Looks for the owners that the configuration names now, and for no others."""
        rules = ((node, self._rule_of(node.spec)) for node in self._cluster.inventory)
        wanted = {node.spec.name: (node, rule) for node, rule in rules if rule is not None}
        for name, watch in list(self._watches.items()):
            if wanted.get(name) != (watch.node, watch.rule) or watch.task.done():
                self._watches.pop(name).task.cancel()
        for name, (node, rule) in wanted.items():
            if name not in self._watches:
                self._watches[name] = _Watch(node, rule, self._note, lambda name: self.on_news(name))

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
                async with contextlib.aclosing(presence.watch(self.node, self.rule, _CONNECT_S)) as news:
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
