"""What one service's door is asked, and what it is given beside servers: weights, keys, the share of a canary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from ugro.core.door import Door, DoorStats, ServerState
from ugro.core.errors import UgroError
from ugro.core.job import Job, JobState
from ugro.core.service import Service
from ugro.policy.serving.replicas import DoorSeen, View, server_name
from ugro.policy.serving.scaling import Load, Scaled, ScalingRule, ScalingState, scale
from ugro.policy.serving.weights import Weighing, adopted, next_weights, weight_of_new

_STATS_S = 1.0


class Parts(Protocol):
    def door(self, service: Service, job: Job) -> Door: ...

    def speed(self, node: str) -> float | None: ...


class DoorKeeping:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.client: Door | None = None
        self.stats: DoorStats | None = None
        self._run: tuple[int, int] | None = None  # of the door: its job and attempt
        self._asked_at = float("-inf")
        self._is_fresh = False  # what stats say was asked in this look
        self._weighing: Weighing | None = None  # until the door was first seen
        self._scaling = ScalingState()
        self._keys: Mapping[str, str] | None = None  # that the door has
        self._share: float | None = None

    async def look(self, service: Service, job: Job | None) -> DoorSeen:
        """Without its servers, if it cannot be asked now."""
        self._is_fresh = False
        if job is None or job.state is not JobState.RUNNING:
            self.client, self._run, self.stats = None, None, None  # nothing of it runs or waits any more
            return DoorSeen(job)
        if self._run != (job.id, job.attempt):
            self.client, self._run = self._parts.door(service, job), (job.id, job.attempt)
            self._keys = self._share = None
        assert self.client is not None
        try:
            servers = await self.client.servers()
            if time.monotonic() - self._asked_at >= _STATS_S:
                self.stats, self._asked_at = await self.client.stats(), time.monotonic()
                self._is_fresh = True
        except UgroError:
            return DoorSeen(job)
        if self._weighing is None:
            self._weighing = adopted({name: one.weight for name, one in servers.items()}, time.monotonic())
        return DoorSeen(job, servers)

    async def keep(self, view: View) -> None:
        """Raises UgroError if the door cannot be asked."""
        if self.client is None or view.door.servers is None:
            return
        await self._keep_keys(self.client, view.service)
        await self._keep_share(self.client, view)
        if self._is_fresh and self.stats is not None:
            await self._keep_weights(self.client, view, self.stats)

    async def _keep_keys(self, door: Door, service: Service) -> None:
        wanted = {one.sha256: one.id for one in service.keys}
        if self._keys != wanted:
            await door.set_keys(wanted)
            self._keys = wanted

    async def _keep_share(self, door: Door, view: View) -> None:
        rollout = view.service.rollout
        servers = view.door.servers or {}
        has_some = any(server.canary and server.state is ServerState.READY for server in servers.values())
        share = rollout.canary or 0.0 if rollout is not None and rollout.is_held and has_some else 0.0
        if self._share != share:
            await door.share_canary(share)
            self._share = share

    async def _keep_weights(self, door: Door, view: View, stats: DoorStats) -> None:
        servers = {name: one for name, one in (view.door.servers or {}).items() if one.state is not ServerState.DRAIN}
        paces = {name: stats.servers[name].pace for name in servers if name in stats.servers}
        before = self._weighing or Weighing()
        speeds = {name: speed for name, speed in self._speeds(view).items() if name in servers}
        self._weighing = next_weights(before, paces, speeds, time.monotonic())
        for name, weight in self._weighing.weights.items():
            if servers[name].weight != weight:
                await door.set_weight(name, weight)

    def _speeds(self, view: View) -> dict[str, float]:
        """What was measured of the nodes of replicas that are ready."""
        found: dict[str, float] = {}
        for one in view.seen:
            if one.is_ready and one.job is not None and one.job.placement is not None:
                speed = self._parts.speed(one.job.placement.node_names[0])
                found |= {server_name(one.number): speed} if speed else {}
        return found

    def first_weight(self, name: str, view: View) -> int:
        """Of a server that is added, beside others that may be added in the same look."""
        return weight_of_new(self._weighing or Weighing(), name, self._speeds(view), time.monotonic())

    def scaled(self, view: View) -> Scaled | None:
        """How many replicas the load needs; None: nobody asked for that, or nothing is known."""
        wish, stats = view.service.spec.scale, self.stats
        if wish is None or stats is None or not self._is_fresh:
            return None
        rule = ScalingRule(wish.least, wish.most, wish.queue, wish.latency_s, idle_s=wish.idle_s)
        ready = sum(one.is_serving for one in view.seen if one.replica.dropped is None)
        load = Load(
            time.monotonic(), stats.sessions, stats.queued, stats.held, stats.requests, ready, stats.latency.p90_s
        )
        decided = scale(rule, load, view.service.wanted, self._scaling)
        self._scaling = decided.state
        return decided
