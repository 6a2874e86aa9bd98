"""Hooks: notices what they are about, records a call of each, and delivers the calls.

A call is on disk before it is tried. Those about ended jobs follow the events, so that none is left out: if too many
wait, no further events are read until there is room again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ugro.features.alerts.channels import SendFailure
from ugro.features.hooks import rules as triggers
from ugro.features.hooks.config import Hook, HookSection, IdleHook, JobEndedHook, NodeLostHook, QueueHook
from ugro.features.hooks.model import Delivery, DeliveryState, HookName, HookReport
from ugro.features.hooks.operations import (
    DeliveryList,
    HookList,
    ListHookDeliveries,
    ListHooks,
    TestedHook,
    TestHook,
)
from ugro.features.hooks.rules import HOUR_S, Losses, Patience, Seen
from ugro.features.hooks.store import MOST_WAITING, HookStore, NewDelivery
from ugro.kernel.access.model import Caller
from ugro.kernel.config.schema import Config
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.model import Job
from ugro.kernel.jobs.store import End
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.links.model import NodeReport, Status
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support import commands as command
from ugro.kernel.support import commands as signed_post
from ugro.kernel.support import moments as clock
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.errors import NotFound, TimedOut, UgroError
from ugro.kernel.support.moments import boot_clock_s, delay_s, elapsed_s, place_s
from ugro.kernel.support.process import point
from ugro.kernel.support.quantities import format_duration
from ugro.kernel.support.secrets import masked_command

# --- delivering -------------------------------------------------------------------------------------------------------
# Delivers the calls of one hook in order: each at least once, with the same id and content, however often it is tried.
#
# A try that an agent did not survive is made again, so a receiver may see an id twice.


log = logging.getLogger(__name__)

_LOOK_S = 5.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0
_GIVEN_UP_S = 24 * HOUR_S


class Courier:
    def __init__(self, name: HookName, store: HookStore, hook: Callable[[], Hook | None], folder: Callable[[], Path]):
        """``hook`` is called for each try, so that an edit of the configuration takes effect at once."""
        self.name = name
        self._store = store
        self._hook = hook
        self._folder = folder
        self.added = ChangeSignal()
        self._sent_s: list[float] = []

    async def run(self) -> None:
        while True:
            seen = self.added.count
            try:
                delivery = await self._store.next(self.name)
            except UgroError as error:
                log.error("cannot read the calls of %s: %s", self.name, error)
                delivery = None
            if delivery is None:
                await self.added.wait(seen, _LOOK_S)
            else:
                await self._deliver(delivery)

    async def try_once(self, delivery: Delivery) -> None:
        """Raises SendFailure."""
        hook = self._hook()
        if hook is None:
            raise SendFailure(f"hook {self.name}: it is no longer in the cluster file", may_pass=False)
        if isinstance(hook.call, str):
            await self._post(hook, hook.call, delivery)
        else:
            await self._run(hook, hook.call, delivery)

    async def _deliver(self, delivery: Delivery) -> None:
        """Returns when it is over, one way or the other."""
        try:
            await self._within_budget()
            error = await self._attempt(delivery)
            if error is None:
                await self._store.tried(delivery, DeliveryState.DELIVERED)
                return
            age_s = elapsed_s(await self._store.age(delivery), clock.now())
            if not error.may_pass or age_s > _GIVEN_UP_S:
                log.error("%s; given up: %s", error.message, delivery.id)
                await self._store.tried(delivery, DeliveryState.FAILED, error.message)
                return
            log.warning("%s; it is tried again", error.message)
            await self._store.tried(delivery, DeliveryState.WAITING, error.message)
        except UgroError as trouble:
            log.error("cannot note a call of %s: %s", self.name, trouble)
        pause_s = delay_s(delivery.tries + 1, random.random(), base_s=_FIRST_PAUSE_S, cap_s=_LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s)

    async def _attempt(self, delivery: Delivery) -> SendFailure | None:
        point("hook.sending")
        try:
            await self.try_once(delivery)
        except SendFailure as error:
            return error
        point("hook.sent")
        return None

    async def _within_budget(self) -> None:
        """Tries count, too: one that always fails is not made more often either."""
        while (hook := self._hook()) is not None:
            now_s = clock.boot_clock_s()
            self._sent_s = [at_s for at_s in self._sent_s if now_s - at_s < HOUR_S]
            if len(self._sent_s) < hook.most_per_hour:
                self._sent_s.append(now_s)
                return
            # The budget may be raised meanwhile, or the hook be taken out of the cluster file.
            await asyncio.sleep(min(_LOOK_S, self._sent_s[0] + HOUR_S - now_s))

    async def _post(self, hook: Hook, address: str, delivery: Delivery) -> None:
        what = f"hook {self.name}"
        key = signed_post.key_of(what, hook.secret_file, hook.secret_env)
        names = {"hook": self.name.value, "delivery": delivery.id}
        await signed_post.send(what, address, delivery.body.encode(), key, hook.timeout, **names)

    async def _run(self, hook: Hook, argv: tuple[str, ...], delivery: Delivery) -> None:
        env = {"UGRO_HOOK": self.name.value, "UGRO_DELIVERY": delivery.id}
        content = delivery.body.encode()
        try:
            ended = await command.run(argv, env=env, cwd=self._folder(), timeout_s=hook.timeout, content=content)
        except (TimedOut, command.NotStarted) as error:
            raise SendFailure(f"hook {self.name}: {error.message}") from error
        for line in ended.said.splitlines()[-20:]:
            log.info("hook %s: %s", self.name, line[:500])
        if ended.complaint is not None:
            raise SendFailure(f"hook {self.name}: {ended.complaint}")


# --- occasions --------------------------------------------------------------------------------------------------------
# What hooks are called for: the content of each call, from what the agent knows.


_MOST_LISTED = 100


@dataclass(frozen=True, slots=True)
class Idle:
    """A node that has had nothing to do."""

    node: str
    idle_s: float
    labels: tuple[str, ...] = ()


def queue_is_long(waiting: Sequence[Job], running: int, limit: int, lasted_s: float) -> dict[str, Any]:
    return {
        "limit": limit,
        "waiting": len(waiting),
        "running": running,
        "lasted_s": round(lasted_s, 1),
        "jobs": [_wish(job) for job in waiting[:_MOST_LISTED]],
    }


def nodes_are_idle(idle: Sequence[Idle]) -> dict[str, Any]:
    listed = idle[:_MOST_LISTED]
    return {"nodes": [{"node": one.node, "idle_s": round(one.idle_s, 1), "labels": list(one.labels)} for one in listed]}


def node_is_lost(report: NodeReport) -> dict[str, Any]:
    return {"node": report.name, "labels": list(report.labels), "error": report.error or "", "since": report.since}


def job_has_ended(end: End) -> dict[str, Any]:
    return {
        "job": end.job,
        "name": end.name,
        "state": end.state,
        "reason": end.reason,
        "attempt": end.attempt,
        "ended_at": end.at,
        "lasted_s": end.lasted_s,
    }


def delivery(
    hook: HookName, cluster: str, content: dict[str, Any], new_id: str, *, is_test: bool = False
) -> NewDelivery:
    body = {"id": new_id, "hook": hook, "time": clock.now().at, "cluster": cluster, "test": is_test, **content}
    return NewDelivery(new_id, hook, json.dumps(json.loads(dumps(body))), is_test)


def _wish(job: Job) -> dict[str, Any]:
    wanted = job.spec.resources
    return {
        "job": job.id,
        "name": job.spec.name,
        "priority": job.spec.priority,
        "nodes": wanted.min_nodes,
        "gpus_per_node": wanted.gpus_per_node,
        "cpus": wanted.cpus,
        "memory_bytes": wanted.memory_bytes,
        "labels": list(wanted.labels),
    }


# --- service ----------------------------------------------------------------------------------------------------------


_SERVICE_LOOK_S = 1.0
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

    @answers(ListHooks)
    async def list_hooks(self, asked: ListHooks, caller: Caller) -> HookList:
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
        return HookList(tuple(found))

    @answers(ListHookDeliveries)
    async def list_deliveries(self, asked: ListHookDeliveries, caller: Caller) -> DeliveryList:
        hook = _named(asked.hook) if asked.hook is not None else None
        return DeliveryList(tuple(await self._store.newest(asked.limit, hook)))

    @answers(TestHook)
    async def test(self, asked: TestHook, caller: Caller) -> TestedHook:
        """Now and by itself. Raises SendFailure."""
        name = _named(asked.name)
        if self._hook(name) is None:
            raise NotFound(f"there is no hook {name} in the cluster file", hint="see: ugro hooks ls")
        new = self._new(name, _SAMPLES[name], is_test=True)
        await self._couriers[name].try_once(Delivery(0, new.id, name, new.body, "", is_test=True))
        return TestedHook(new.id)

    # --- looking -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                if not self._engine.safe_mode.is_on:
                    await self._look()
            except UgroError as error:
                log.error("cannot look at what hooks are about: %s", error)
            await asyncio.sleep(_SERVICE_LOOK_S)

    async def _look(self) -> None:
        hooks = self._config.section(HookSection)
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
            await self._add(HookName.QUEUE, queue_is_long(waiting, running, hook.jobs, lasted_s))

    async def _look_at_idle(self, hook: IdleHook) -> None:
        idle = self._idle(hook.label)
        lasting = [one for one in idle if one.idle_s >= hook.for_]
        since_s = await self._due(HookName.IDLE, len(lasting) >= hook.nodes, _patience(hook, 0.0))
        if since_s is not None:
            await self._add(HookName.IDLE, nodes_are_idle(lasting))

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
            await self._add(HookName.NODE_LOST, node_is_lost(reports[name]))
            self._losses = replace(self._losses, reported=self._losses.reported | {name})

    async def _look_at_ends(self, hook: JobEndedHook) -> None:
        if self._seen_until is None:
            self._seen_until = await self._store.start_after(await self._ends.newest())
            self._follows_jobs = True
        while ends := await self._ends.after(self._seen_until, _ENDS_AT_ONCE):
            wanted = [job_has_ended(end) for end in ends if end.state in hook.states]
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
        return delivery(name, self._config.cluster.name, content, uuid.uuid4().hex, is_test=is_test)

    def _reports(self) -> list[NodeReport]:
        found = (self._input.reports.of(node).report for node in self._cluster.inventory)
        return [report for report in found if report is not None]

    def _courier(self, name: HookName) -> Courier:
        return Courier(name, self._store, lambda: self._hook(name), self._folder)

    def _folder(self) -> Path:
        return self._cluster.path.parent if self._cluster.path else Path("/")

    def _hook(self, name: HookName) -> Hook | None:
        return self._config.section(HookSection).named(name)

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


def _named(word: str) -> HookName:
    try:
        return HookName(word)
    except ValueError:
        raise NotFound(f"there is no hook {word!r:.60}", hint=f"hooks: {', '.join(HookName)}") from None
