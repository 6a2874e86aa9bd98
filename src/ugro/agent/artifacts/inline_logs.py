"""Logs that came with the news of a small command's end. They are recorded with that end, in one commit, and become
files when somebody wants to read them: to make folders and files takes longer than most such commands.
"""

from __future__ import annotations

import asyncio
from functools import partial

from ugro.agent.artifacts.log_mirror import LogMirror
from ugro.agent.support.aio import to_the_end
from ugro.core.errors import UgroError
from ugro.core.support.moment import unix_seconds
from ugro.store.jobs import JobStore
from ugro.store.smalllogs import SmallLog


class SmallLogs:
    def __init__(self, jobs: JobStore, mirror: LogMirror) -> None:
        self.mirror = mirror
        self._jobs = jobs
        self._lock = asyncio.Lock()

    async def show(self, job: int) -> None:
        """Before the files of a job that has ended are read."""
        found = await self._jobs.small_log(job)
        if found is not None:
            log, ended_at = found
            await self.keep(log, unix_seconds(ended_at))

    async def keep(self, log: SmallLog, ended_unix_s: float) -> None:
        try:
            async with self._lock:
                await to_the_end(partial(self.mirror.keep, log.job, log.attempt, log.ranks, ended_unix_s))
        except OSError as error:
            hint = "nothing is lost: it is written when there is room"
            raise UgroError(f"the log of job {log.job} cannot be written: {error}", hint=hint) from error
