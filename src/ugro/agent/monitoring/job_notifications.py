"""Notifications that a job has ended, to the log and to the channels that the job names in ``notify``.

The position in the events is kept on disk, so an end is reported even if the agent died or was stopped right after it.
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
        self._place = await self._store.alerts.notified_until()
        while True:
            seen = self._moved.count
            try:
                await self._send_new()
            except UgroError as error:
                log.error("cannot send notifications about ended jobs: %s", error)
            await self._moved.wait(seen, _LOOK_S)
            await asyncio.sleep(_GATHER_S)  # jobs that end together are handled together

    async def _send_new(self) -> None:
        while ends := await self._store.ends.after(self._place):
            for end in ends:
                log.info("%s %s: %s", end.name, end.state, end.reason, extra={"job": end.job, "attempt": end.attempt})
                if end.has_notify:
                    job = await self._store.jobs.get(end.job)
                    self._notifier.tell(job.spec.notify, message_of(job, end, self._cluster.config.cluster.name))
                self._place = end.seq  # even if it cannot be recorded: nothing is sent twice
            await self._store.alerts.set_notified_until(self._place)


def message_of(job: Job, end: End, cluster: str) -> Message:
    after = ""
    if end.lasted_s is not None:
        after = f" after {format_duration(end.lasted_s)}"
    nodes = f"on {', '.join(job.placement.node_names)}; " if job.placement else ""
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
