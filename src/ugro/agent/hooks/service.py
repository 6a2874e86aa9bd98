"""Hooks: notices what they are about, records a call of each, and delivers the calls.

A call is on disk before it is tried. Those about ended jobs follow the events, so that none is left out: if too many
wait, no further events are read until there is room again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from ugro.agent.engine.reconciler import Engine
from ugro.agent.hooks import occasions
from ugro.agent.hooks.delivering import Courier
from ugro.agent.hooks.occasions import Idle
from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.scheduler_input import SchedulerInput
from ugro.config.hooks import Hook, IdleHook, JobEndedHook, NodeLostHook, QueueHook
from ugro.config.schema import Config
from ugro.core.errors import NotFound, UgroError
from ugro.core.hook import Delivery, HookName, HookReport
from ugro.core.node import NodeReport, Status
from ugro.core.support.clock import boot_clock_s
from ugro.core.support.moment import place_s
from ugro.core.support.quantity import format_duration
from ugro.core.support.secret import masked_command
from ugro.policy.hooks import triggers
from ugro.policy.hooks.triggers import Losses, Patience, Seen
from ugro.store.database import Store
from ugro.store.hooks import MOST_WAITING, NewDelivery

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_ENDS_AT_ONCE = 200


class HookService:
    def __init__(self, store: Store, cluster: Cluster, engine: Engine, scheduler_input: SchedulerInput) -> None:
        self._store = store.hooks
        self._ends = store.ends
        self._cluster = cluster
        self._engine = engine
        self._input = scheduler_input
        self._couriers = {name: self._courier(name) for name in HookName}
        self._seen: dict[HookName, Seen] = {}
        self._losses = Losses({})
        self._idle_s: dict[str, float] = {}  # since when each node is idle
        self._seen_until: int | None = None
        self._follows_jobs = True  # an agent before this one may have

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, courier in self._couriers.items():
                group.create_task(courier.run(), name=f"call {name}")
            group.create_task(self._watch(), name="look at what hooks are about")

    # --- what others ask -----------------------------------------------------------------------------------------

    async def listed(self) -> list[HookReport]:
        waiting = await self._store.waiting()
        found = []
        for name in HookName:
            if (hook := self._hook(name)) is not None:
                newest = await self._store.newest(1, name)
                last = newest[0] if newest else None
                found.append(
                    HookReport(
                        name,
                        _shown(hook),
                        _when(hook),
                        waiting.get(name, 0),
                        last.created_at if last else None,
                        last.state if last else None,
                        last.error if last else "",
                    )
                )
        return found

    async def deliveries(self, limit: int, hook: HookName | None) -> list[Delivery]:
        return await self._store.newest(limit, hook)

    async def test(self, name: HookName) -> str:
        """Calls it once, now and by itself. Returns the id; raises SendFailure."""
        if self._hook(name) is None:
            raise NotFound(f"there is no hook {name} in the cluster file", hint="see: ugro hooks ls")
        new = self._new(name, _SAMPLES[name], is_test=True)
        await self._couriers[name].try_once(Delivery(0, new.id, name, new.body, "", is_test=True))
        return new.id

    # --- looking -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                if not self._engine.safe_mode.is_on:
                    await self._look()
            except UgroError as error:
                log.error("cannot look at what hooks are about: %s", error)
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        hooks = self._config.hooks
        if hooks.queue_longer_than is not None:
            await self._look_at_queue(hooks.queue_longer_than)
        if hooks.idle is not None:
            await self._look_at_idle(hooks.idle)
        if hooks.node_lost is not None:
            await self._look_at_losses(hooks.node_lost)
        if hooks.job_ended is not None:
            await self._look_at_ends(hooks.job_ended)
        elif self._follows_jobs:
            await self._store.stop_following()  # jobs that end while nobody asks are not reported later
            self._follows_jobs, self._seen_until = False, None

    async def _look_at_queue(self, hook: QueueHook) -> None:
        live = self._engine.live
        was_long = self._seen.get(HookName.QUEUE, Seen()).since_s is not None
        is_long = triggers.is_long(live.waiting_count, hook.jobs, was_long)
        since_s = await self._due(HookName.QUEUE, is_long, _patience(hook, hook.for_))
        if since_s is not None:
            waiting, running = live.waiting(), len(live.holding())
            lasted_s = boot_clock_s() - since_s
            await self._add(HookName.QUEUE, occasions.queue_is_long(waiting, running, hook.jobs, lasted_s))

    async def _look_at_idle(self, hook: IdleHook) -> None:
        idle = self._idle(hook.label)
        lasting = [one for one in idle if one.idle_s >= hook.for_]
        since_s = await self._due(HookName.IDLE, len(lasting) >= hook.nodes, _patience(hook, 0.0))
        if since_s is not None:
            await self._add(HookName.IDLE, occasions.nodes_are_idle(lasting))

    def _idle(self, label: str | None) -> list[Idle]:
        """The nodes that could take a job and have none. Those that sleep, are drained or lost are not among them."""
        now_s, found = boot_clock_s(), {}
        for report in self._reports():
            is_free = report.status.is_up and report.drained is None and report.same_as is None
            has_label = label is None or label in report.labels
            if is_free and has_label and not self._engine.live.has_jobs_on(report.name):
                found[report.name] = (self._idle_s.get(report.name, now_s), report.labels)
        self._idle_s = {name: since_s for name, (since_s, _) in found.items()}
        return [Idle(name, now_s - since_s, labels) for name, (since_s, labels) in found.items()]

    async def _look_at_losses(self, hook: NodeLostHook) -> None:
        reports = {one.name: one for one in self._reports() if hook.label is None or hook.label in one.labels}
        lost = [name for name, one in reports.items() if one.status is Status.UNREACHABLE and one.same_as is None]
        self._losses, new = triggers.look_at_losses(self._losses, lost, hook.for_, boot_clock_s())
        for name in new:
            since_s = await self._due(HookName.NODE_LOST, True, _patience(hook, 0.0))
            if since_s is None:
                return  # they are looked at again when there is room
            await self._add(HookName.NODE_LOST, occasions.node_is_lost(reports[name]))
            self._losses = replace(self._losses, reported=self._losses.reported | {name})

    async def _look_at_ends(self, hook: JobEndedHook) -> None:
        if self._seen_until is None:
            self._seen_until = await self._store.start_after(await self._ends.newest())
            self._follows_jobs = True
        while ends := await self._ends.after(self._seen_until, _ENDS_AT_ONCE):
            wanted = [occasions.job_has_ended(end) for end in ends if end.state in hook.states]
            new = [self._new(HookName.JOB_ENDED, content) for content in wanted]
            if not await self._store.add(new, seen_until=ends[-1].seq):
                return
            self._seen_until = ends[-1].seq
            self._couriers[HookName.JOB_ENDED].added.notify()

    async def _due(self, name: HookName, is_so: bool, patience: Patience) -> float | None:
        """Since when it is so, if it is to be called now."""
        if name not in self._seen:
            by = self._input.clock.reading()
            calls = await self._store.calls(name, patience.most_per_hour)
            self._seen[name] = Seen(calls_s=tuple(sorted(place_s(at, by) for at in calls)))
        self._seen[name], is_due = triggers.look(self._seen[name], is_so, patience, boot_clock_s())
        return self._seen[name].since_s if is_due else None

    async def _add(self, name: HookName, content: dict[str, Any]) -> None:
        if await self._store.add([self._new(name, content)]):
            self._couriers[name].added.notify()
        else:
            log.error("hook %s: %d calls wait for it already; this one is left out", name, MOST_WAITING)

    def _new(self, name: HookName, content: dict[str, Any], *, is_test: bool = False) -> NewDelivery:
        return occasions.delivery(name, self._config.cluster.name, content, uuid.uuid4().hex, is_test=is_test)

    def _reports(self) -> list[NodeReport]:
        found = (self._input.reports.of(node).report for node in self._cluster.inventory)
        return [report for report in found if report is not None]

    def _courier(self, name: HookName) -> Courier:
        return Courier(name, self._store, lambda: self._hook(name), self._folder)

    def _folder(self) -> Path:
        return self._cluster.path.parent if self._cluster.path else Path("/")

    def _hook(self, name: HookName) -> Hook | None:
        return self._config.hooks.named(name)

    @property
    def _config(self) -> Config:
        return self._cluster.config


_SAMPLES: dict[HookName, dict[str, Any]] = {
    HookName.QUEUE: {"limit": 0, "waiting": 0, "running": 0, "lasted_s": 0.0, "jobs": []},
    HookName.IDLE: {"nodes": []},
    HookName.NODE_LOST: {"node": "", "labels": [], "error": "this is a test", "since": None},
    HookName.JOB_ENDED: {"job": 0, "name": "test", "state": "succeeded", "reason": "this is a test", "attempt": 0},
}


def _patience(hook: Hook, lasting_s: float) -> Patience:
    return Patience(lasting_s, hook.cool_down, hook.most_per_hour)


def _shown(hook: Hook) -> str:
    """Of an address only the host: its path may be a secret. Of a command no values that look like one."""
    if isinstance(hook.call, tuple):
        return " ".join(masked_command(hook.call))
    scheme, _, rest = hook.call.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest, maxsplit=1)[0]}/…"


def _when(hook: Hook) -> str:
    match hook:
        case QueueHook():
            return f"more than {hook.jobs} jobs wait for {format_duration(hook.for_)}"
        case IdleHook():
            return f"{hook.nodes} or more nodes are idle for {format_duration(hook.for_)}"
        case NodeLostHook():
            return f"a node is lost for {format_duration(hook.for_)}"
        case JobEndedHook():
            return f"a job has ended: {', '.join(hook.states)}"
    return ""
