"""Logs that came with the news of a small command's end. They are recorded with that end, in one commit; files of them
are made when there is time, or when somebody wants to read them: folders and files cost more than the command did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from ugro.agent.logmirror import LogMirror
from ugro.agent.threads import to_the_end
from ugro.core.errors import UgroError
from ugro.store.freshlogs import FreshLog
from ugro.store.jobs import JobStore


class FreshLogs:
    def __init__(self, jobs: JobStore, mirror: LogMirror) -> None:
        self._jobs = jobs
        self.mirror = mirror
        self._logs: dict[int, FreshLog] | None = None  # by job; None before those of an agent before us are read
        self._shown: set[int] = set()  # jobs whose files are there, but may not last
        self._lock = asyncio.Lock()

    async def take(self, logs: Collection[FreshLog]) -> None:
        """Before their end is recorded: whoever hears of it finds them here."""
        known = await self._known()
        await self.mirror.let_go((log.job, log.attempt, rank) for log in logs for rank, _ in log.ranks)
        known.update({log.job: log for log in logs})

    async def show(self, job: int) -> None:
        """Before somebody reads what a job wrote."""
        if job in await self._known():
            async with self._lock:
                await self._write([job])

    async def settle(self, jobs: Iterable[int]) -> None:
        """Returns when files have them for good."""
        known = await self._known()
        async with self._lock:
            mine = [known[job] for job in jobs if job in known]
            if not mine:
                return
            await self._write([log.job for log in mine])
            await to_the_end(lambda: self._sync(mine))
            await self._jobs.forget_fresh_logs([log.job for log in mine])
            for log in mine:
                del known[log.job]
                self._shown.discard(log.job)

    async def settle_all(self) -> None:
        await self.settle(list(await self._known()))

    async def _known(self) -> dict[int, FreshLog]:
        if self._logs is None:
            found = await self._jobs.fresh_logs()
            if self._logs is None:  # nobody else was faster
                self._logs = {log.job: log for log in found}
        return self._logs

    async def _write(self, jobs: Iterable[int]) -> None:
        known = await self._known()
        wanted = [known[job] for job in jobs if job in known and job not in self._shown]
        if not wanted:
            return

        def write() -> None:
            for log in wanted:
                self.mirror.keep(log.job, log.attempt, log.ranks)

        try:
            await to_the_end(write)
        except OSError as error:
            hint = "nothing is lost: the database has them"
            raise UgroError(f"logs cannot be written: {error}", hint=hint) from error
        self._shown.update(log.job for log in wanted)
        self.mirror.changed.notify()

    def _sync(self, logs: Iterable[FreshLog]) -> None:
        for log in logs:
            self.mirror.sync(log.job, log.attempt, [rank for rank, _ in log.ranks])
