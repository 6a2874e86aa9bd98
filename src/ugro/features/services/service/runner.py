"""Drives one service: looks at its jobs, its nodes and its door, and does what the rules say is next.

What it decides is in the row before it is done. Jobs are submitted with keys that are made of the service's key and
the replica's number, so an agent that was killed at any moment goes on with the same jobs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ugro.features.services.model import (
    Door,
    DoorPlace,
    NewServer,
    Phase,
    ReplicaPhase,
    Service,
    ServiceReport,
    ServiceState,
)
from ugro.features.services.rules import steps
from ugro.features.services.rules.report import moved, moved_text, phase_of, report_of
from ugro.features.services.rules.rollout import ENDED, Change, Drop, applied, changes, event_of, forgotten
from ugro.features.services.rules.steps import Seen, Turn, View, server_name
from ugro.features.services.service.creation import now
from ugro.features.services.service.door import DoorKeeping, is_shut_out
from ugro.features.services.service.replicas import ReplicaWatch, Run, door_key, replica_job, replica_key
from ugro.features.services.store import ServiceStore
from ugro.kernel.access.model import is_loopback
from ugro.kernel.jobs.model import Cause, Failure, Job, JobState
from ugro.kernel.jobs.service import JobService
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support.aio import ChangeSignal, wait_for_any
from ugro.kernel.support.errors import RemoteFailure, TimedOut, UgroError
from ugro.kernel.support.process import point

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_GATHER_S = 0.1  # other jobs may move all the time
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_CALM_S = 600.0  # after which an end is forgotten
_LASTING_PAUSE_S = 120.0  # of a door that fails for a reason that lasts
_MOST_ROUNDS = 10  # of decisions in one look
_POINTS = {Turn.DRAIN: "service.drained", Turn.READY: "service.readied", Turn.REMOVE: "service.removed"}


class Parts(Protocol):
    """What a runner works with."""

    @property
    def services(self) -> ServiceStore: ...
    @property
    def store(self) -> JobStore: ...
    @property
    def jobs(self) -> JobService: ...
    @property
    def watch(self) -> ReplicaWatch: ...

    def door(self, service: Service, job: Job) -> Door: ...

    async def drained(self) -> Mapping[str, str]: ...

    def speed(self, node: str) -> float | None: ...

    def is_beside_door(self, service: Service, node: str) -> bool: ...

    async def door_address(self, service: Service) -> str: ...




    async def next_door(self, service: Service, *, has_failed: bool) -> DoorPlace: ...

    async def submit_door(self, service: Service) -> None: ...


class Runner:
    def __init__(self, parts: Parts, service: Service, on_change: Callable[[], None]) -> None:
        self._parts = parts
        self.service = service
        self.view = View(service)
        self.asked = ChangeSignal()  # a person has changed the row
        self._on_change = on_change
        self._door = DoorKeeping(parts)
        self._since: dict[tuple[int, str], float] = {}
        self._over: set[int] = set()  # replicas whose jobs had ended at the last look
        self._freed_at = float("-inf")  # when the last of them did
        self._ends: list[float] = []  # when replicas and doors ended that should not have
        self._renewed_at = time.monotonic()  # when the door got another job
        self._failures: dict[int, Failure | None] = {}  # of jobs that failed
        self._problem = ""
        self._phase: Phase | None = None
        self._changing = asyncio.Lock()

    # --- what others ask -----------------------------------------------------------------------------------------

    def report(self) -> ServiceReport:
        notes = [self._problem] if self._problem else []
        return report_of(replace(self.view, service=self.service), self._door.stats, notes)

    async def change(self, how: Callable[[Service], Service]) -> Service:
        """Of the row, in one transaction."""
        async with self._changing:
            self.service = await self._parts.services.change(self.service.id, how)
        self.asked.notify()
        self._on_change()
        return self.service

    # --- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the service has ended."""
        try:
            while True:
                seen = {one: one.count for one in (self.asked, self._parts.watch.changed, self._parts.jobs.changed)}
                await self._try()
                if self.service.has_ended:
                    return
                await asyncio.sleep(_GATHER_S)
                await wait_for_any(seen, _LOOK_S)
        finally:
            self._listen({})

    async def _try(self) -> None:
        try:
            await self.look()
            problem = ""
        except UgroError as error:  # a node or the door may come back: it is tried again
            problem = str(error)
        if problem and problem != self._problem:
            log.warning("service %s cannot go on now: %s", self.service.name, problem)
        if problem != self._problem:
            self._problem = problem
            self._on_change()

    async def look(self) -> None:
        for _ in range(_MOST_ROUNDS):
            self.view = await self._see()
            if not await self._decide(changes(self.view)):
                break
        await self._tell()
        await self._do_all(steps.next_steps(self.view))
        if self.service.state is ServiceState.ACTIVE:
            await self._door.keep(self.view)
            await self._scale()

    # --- looking -------------------------------------------------------------------------------------------------

    async def _see(self) -> View:
        service = self.service
        known = self._parts.store.submitted
        jobs = {one.number: await known(replica_key(service, one.number)) for one in service.replicas}
        self._listen({number: job for number, job in jobs.items() if job is not None})
        door_job = await known(door_key(service))
        current = {job.id for job in (door_job, *jobs.values()) if job is not None}
        self._failures = {number: one for number, one in self._failures.items() if number in current}
        door = replace(
            await self._door.look(service, door_job),
            last_lines=await self._last_lines(door_job),
            is_lost=(failure := await self._failure(door_job)) is not None and failure.cause is Cause.NODE_LOST,
            is_shut_out=door_job is not None and is_shut_out(door_job),
        )
        drained = await self._parts.drained()
        servers = door.servers or {}
        seen = [
            self._timed(
                Seen(
                    one,
                    job := jobs[one.number],
                    self._parts.watch.report((job.id, job.attempt)) if job is not None else None,
                    servers.get(server_name(one.number)),
                    is_on_drained=bool(job and job.held and any(node in drained for node in job.held.node_names)),
                    last_lines=await self._last_lines(job),
                )
            )
            for one in service.replicas
        ]
        if any(one.job is not None and one.job.is_final for one in seen if one.number not in self._over):
            self._freed_at = time.monotonic()
        self._over = {one.number for one in seen if one.job is not None and one.job.is_final}
        freed_s = time.monotonic() - self._freed_at
        return View(service, tuple(seen), door, self._may_replace(), freed_s)

    async def _last_lines(self, job: Job | None) -> tuple[str, ...]:
        """Of the log of one that failed."""
        failure = await self._failure(job)
        return failure.last_lines if failure is not None else ()

    async def _failure(self, job: Job | None) -> Failure | None:
        if job is None or job.state is not JobState.FAILED:
            return None
        if job.id not in self._failures:
            attempts = await self._parts.store.attempts(job.id)
            self._failures[job.id] = attempts[-1].failure if attempts else None
        return self._failures[job.id]

    def _listen(self, jobs: Mapping[int, Job]) -> None:
        runs: dict[Run, str] = {}
        for job in jobs.values():
            if job.placement is not None and job.state in (JobState.RUNNING, JobState.UNREACHABLE, JobState.STOPPING):
                runs[job.id, job.attempt] = job.placement.nodes[0]
        self._parts.watch.keep(self.service.id, runs)

    def _timed(self, seen: Seen) -> Seen:
        phase = seen.phase
        is_unready = phase in (ReplicaPhase.STARTING, ReplicaPhase.RESTARTING, ReplicaPhase.UNREADY)
        return replace(
            seen,
            away_s=self._lasts_s(seen.number, "away", phase is ReplicaPhase.UNREACHABLE),
            waits_s=self._lasts_s(seen.number, "waits", phase is ReplicaPhase.WAITING),
            unready_s=self._lasts_s(seen.number, "unready", is_unready),
            leaving_s=self._lasts_s(seen.number, "leaving", seen.replica.dropped is not None),
        )

    def _lasts_s(self, number: int, what: str, is_so: bool) -> float:
        if not is_so:
            self._since.pop((number, what), None)
            return 0.0
        return time.monotonic() - self._since.setdefault((number, what), time.monotonic())

    def _may_replace(self) -> bool:
        """After ends that nobody asked for, the next one waits a little longer each time."""
        self._ends = [at for at in self._ends if time.monotonic() - at < _CALM_S]
        if not self._ends:
            return True
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(len(self._ends) - 1, 10))
        return time.monotonic() - self._ends[-1] > pause_s

    # --- deciding ------------------------------------------------------------------------------------------------

    async def _decide(self, wanted: Sequence[Change]) -> bool:
        """Records it. Whether there was something to decide."""
        if not wanted:
            return False
        before = self.view.service
        is_as_seen = await self._record(lambda now_there: applied(now_there, wanted), seen=before)
        if not is_as_seen:  # a person has changed it meanwhile: what was decided was about another update
            return True
        if any(isinstance(change, Drop) and change.reason.startswith(ENDED) for change in wanted):
            self._ends.append(time.monotonic())
        point("service.decided")
        for change in wanted:
            if (event := event_of(change)) is not None:
                await self._parts.store.note(event[0], f"service {before.name}: {event[1]}")
        return self.service != before

    async def _record(self, how: Callable[[Service], Service], *, seen: Service | None = None) -> bool:
        """False: nothing is written, because the row is not what was seen."""
        async with self._changing:
            if seen is not None and self.service != seen:
                return False
            self.service = await self._parts.services.change(self.service.id, how)
        self._on_change()
        return True

    async def _scale(self) -> None:
        decided = self._door.scaled(self.view)
        if decided is None or decided.wanted == self.service.wanted:
            return
        await self._record(lambda one: replace(one, wanted=decided.wanted))
        text = f"service {self.service.name}: {decided.wanted} replicas: {decided.reason}"
        await self._parts.store.note("scaled", text)
        self.asked.notify()

    async def _tell(self) -> None:
        """Its state for the event log, and that it was ready once."""
        phase = phase_of(self.view)
        if any(one.is_ready for one in self.view.seen) and not self.service.was_ready:
            await self._record(lambda one: replace(one, was_ready=True))
        if phase is not self._phase:
            is_first, self._phase = self._phase is None, phase
            self._on_change()
            if not is_first or phase is Phase.STARTING:
                reason = report_of(self.view).reason
                text = f"service {self.service.name} is {phase}" + (f": {reason}" if reason else "")
                await self._parts.store.note("service", text)

    # --- acting --------------------------------------------------------------------------------------------------

    async def _do_all(self, wanted: Sequence[steps.Step]) -> None:
        """One that fails holds none of the others up. Raises its error at the end."""
        problem: UgroError | None = None
        for step in wanted:
            try:
                await self._do(step)
            except UgroError as error:
                problem = problem or error
                if isinstance(error, TimedOut):  # the next look finds out who does not answer
                    break
        if problem is not None:
            raise problem

    async def _do(self, step: steps.Step) -> None:
        service, parts = self.service, self._parts
        match step:
            case steps.Submit(replica, avoid):
                service = await self._addressed()
                key = replica_key(service, replica.number)
                job = replica_job(service, replica, avoid)
                await parts.jobs.submit_made(job, service.user, key)
                point("service.submitted")
            case steps.SubmitDoor():
                await parts.submit_door(service)
                point("service.door")
            case steps.RenewDoor(reason):
                await self._renew_door(reason)
            case steps.Cancel(number):
                await parts.jobs.cancel(str(number))
                point("service.cancelled")
            case steps.Forget(number):
                await self._record(lambda one: forgotten(one, number))
                point("service.forgotten")
                self._since = {key: at for key, at in self._since.items() if key[0] != number}
            case steps.Close():
                await self._record(lambda one: replace(one, state=ServiceState.ENDED, ended_at=now()))
                await parts.store.note("service", f"service {service.name} has stopped")
            case _:
                await self._at_door(step)

    async def _addressed(self) -> Service:
        """With an address of its door that the nodes which are there now reach."""
        address = await self._parts.door_address(self.service)
        if address != self.service.door.address:
            await self._record(lambda one: replace(one, door=replace(one.door, address=address)))
        return self.service

    async def _renew_door(self, reason: str) -> None:
        pause_s = _LASTING_PAUSE_S if self.view.door.has_failed else 0.0
        if not self._may_replace() or time.monotonic() - self._renewed_at < pause_s:
            return
        self._renewed_at = time.monotonic()
        self._ends.append(time.monotonic())
        before, door = self.service.door, self.view.door
        place = before
        if door.is_lost or (door.has_failed and before.moved_from):
            place = await self._parts.next_door(self.service, has_failed=door.has_failed)
        await self._record(lambda one: moved(one, place))
        text = f"the door is started again: {reason}" if place.node == before.node else moved_text(self.service)
        await self._parts.store.note("service", f"service {self.service.name}: {text}")
        self.asked.notify()

    async def _at_door(self, step: steps.Step) -> None:
        door = self._door.client
        if door is None:
            return
        match step:
            case steps.AddServer(number, host, port, is_canary):
                self._expect_place(number, host)
                limit = self.service.spec.concurrency
                name = server_name(number)
                weight = self._door.first_weight(name, self.view)
                await door.add(NewServer(name, host, port, weight, limit, is_canary))
                point("service.added")
            case steps.TurnServer(turn, name):
                await {Turn.DRAIN: door.drain, Turn.READY: door.ready, Turn.REMOVE: door.remove}[turn](name)
                point(_POINTS[turn])
        self.asked.notify()

    def _expect_place(self, number: int, host: str) -> None:
        """A node says where its replica listens. Loopback would be the door's own, with all that listens there."""
        job = next((one.job for one in self.view.seen if one.number == number), None)
        node = job.placement.nodes[0] if job is not None and job.placement is not None else ""
        if is_loopback(host) and not self._parts.is_beside_door(self.service, node):
            text = f"replica {number} says that it listens at {host}, which the door does not reach"
            raise RemoteFailure(text, subject=node, cause="invalid")
