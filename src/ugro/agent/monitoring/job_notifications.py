"""Tells the log, and the channels that a job names in ``notify``, how it ended.

It reads the same events as everybody, from where it was: an end while no agent ran, or just before one died, is told.
"""

from __future__ import annotations

import asyncio
import logging

from ugro.agent.support.change_signal import ChangeSignal
from ugro.agent.tracking.cluster import Cluster
from ugro.core.errors import UgroError
from ugro.core.job import Job, JobState
from ugro.core.support.moment import unix_seconds
from ugro.core.support.quantity import format_duration
from ugro.store.database import Store
from ugro.store.ends import End
from ugro.telemetry.message import Message
from ugro.telemetry.notify import Notifier

log = logging.getLogger(__name__)

_LOOK_S = 5.0
_GATHER_S = 0.25


class JobNotifications:
    def __init__(self, store: Store, cluster: Cluster, notifier: Notifier, moved: ChangeSignal) -> None:
        self._store = store
        self._cluster = cluster
        self._notifier = notifier
        self._moved = moved
        self._place = 0

    async def run(self) -> None:
        self._place = await self._store.alerts.told_until()
        while True:
            seen = self._moved.count
            try:
                await self._tell_new()
            except UgroError as error:
                log.error("ends of jobs could not be told: %s", error)
            await self._moved.wait(seen, _LOOK_S)
            await asyncio.sleep(_GATHER_S)  # many that end together are looked at together

    async def _tell_new(self) -> None:
        while ends := await self._store.ends.after(self._place):
            for end in ends:
                log.info("%s %s: %s", end.name, end.state, end.reason, extra={"job": end.job, "attempt": end.attempt})
                if end.has_notify:
                    job = await self._store.jobs.get(end.job)
                    self._notifier.tell(job.spec.notify, message_of(job, end, self._cluster.config.cluster.name))
                self._place = end.seq  # whether or not it can be recorded: what was told is not told again
            await self._store.alerts.told(self._place)


def message_of(job: Job, end: End, cluster: str) -> Message:
    after = ""
    if end.ended_at and end.started_at:
        after = f" after {format_duration(max(0.0, unix_seconds(end.ended_at) - unix_seconds(end.started_at)))}"
    nodes = f"on {', '.join(job.placement.nodes)}; " if job.placement else ""
    return Message(
        title=f"job {job.id} {job.spec.name} {end.state}{after}",
        severity="warning" if end.state is JobState.FAILED else "info",
        kind="job",
        at=unix_seconds(end.at),
        cluster=cluster,
        detail=f"{end.reason}\n{nodes}attempt {end.attempt}; see: ugro why {job.id}",
        state=end.state,
        job=job.id,
        attempt=end.attempt or None,
    )
