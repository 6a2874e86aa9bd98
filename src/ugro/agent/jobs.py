"""Jobs as a client sees them: submit, look, cancel, follow. The engine does the rest by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from ugro.agent.engine import Engine
from ugro.agent.logmirror import LogMirror
from ugro.agent.snapshot import Snapshots
from ugro.config.jobfile import read_job
from ugro.core.errors import NotFound, Unsatisfiable
from ugro.core.event import Event
from ugro.core.job import Ending, Job, JobState, Launcher
from ugro.policy.fit import check_fits
from ugro.policy.why import Why, why
from ugro.remote import wire
from ugro.store.jobs import JobStore

_LOOK_S = 0.1
_NAMED_JOBS = 1000
_READ = 256 * 1024


class JobService:
    def __init__(self, jobs: JobStore, engine: Engine, snapshots: Snapshots, mirror: LogMirror) -> None:
        self._jobs = jobs
        self._engine = engine
        self._snapshots = snapshots
        self._mirror = mirror

    async def submit(
        self, file: Path | None, fields: Mapping[str, Any], env: Mapping[str, str], user: str, key: str
    ) -> Job:
        names = {job.spec.name: job.id for job in reversed(await self._jobs.newest(_NAMED_JOBS))}

        def resolve(name: str) -> int:
            if name not in names:
                raise NotFound(f"there is no job {name!r}", hint="see: ugro status")
            return names[name]

        spec = read_job(file, fields=fields, env=env, resolve=resolve).spec
        nodes = (await self._snapshots.take([])).nodes
        is_single = spec.launcher is Launcher.COMMAND
        if (misfit := check_fits(spec.resources, nodes, on_one_node=is_single)) is not None:
            raise Unsatisfiable(misfit.reason, hint=misfit.hint)
        submission = await self._jobs.submit(spec, user, key)
        self._engine.wake()
        return submission.job

    async def newest(self, limit: int) -> list[Job]:
        return await self._jobs.newest(limit)

    async def find(self, word: str) -> Job:
        return await self._jobs.find(word)

    async def cancel(self, word: str) -> Job:
        job = await self._jobs.ask_to_end((await self._jobs.find(word)).id, Ending.CANCELLED)
        self._engine.wake()
        return job

    async def why(self, word: str) -> Why:
        job = await self._jobs.find(word)
        waiting = await self._jobs.in_states({JobState.QUEUED, JobState.RECOVERING})
        return why(await self._snapshots.take(waiting), job.id)

    async def wait(self, word: str) -> AsyncGenerator[list[Job]]:
        """The job each time it has moved, until it has ended."""
        shown: tuple[JobState, int, str] | None = None
        number = (await self._jobs.find(word)).id
        while True:
            job = await self._jobs.get(number)
            if (job.state, job.attempt, job.reason) != shown:
                shown = (job.state, job.attempt, job.reason)
                yield [job]
            if job.is_final:
                return
            await asyncio.sleep(_LOOK_S)

    async def events(self, after: int, word: str | None, follow: bool) -> AsyncGenerator[list[Event]]:
        number = (await self._jobs.find(word)).id if word else None
        while True:
            found = await self._jobs.events(after=after, job=number)
            if found:
                after = found[-1].seq
                yield found
            elif not follow:
                return
            else:
                await asyncio.sleep(_LOOK_S)

    async def logs(self, word: str, rank: int | None, follow: bool) -> AsyncGenerator[bytes]:
        """Frames: OUT with the rank as its id. With ``follow`` until the job has ended and all of it was sent."""
        number = (await self._jobs.find(word)).id
        offsets: dict[tuple[int, int], int] = {}
        while True:
            job = await self._jobs.get(number)
            sent = False
            for attempt, at in await self._ranks(job):
                if rank is not None and at != rank:
                    continue
                start = offsets.get((attempt, at), 0)
                content = await asyncio.to_thread(_read, self._mirror.path(job.id, attempt, at), start)
                if content:
                    offsets[attempt, at] = start + len(content)
                    sent = True
                    for begin in range(0, len(content), wire.CHUNK):
                        yield wire.frame(wire.OUT, at, content[begin : begin + wire.CHUNK])
            if not sent:
                if not follow or job.is_final:
                    return
                await asyncio.sleep(_LOOK_S)

    async def _ranks(self, job: Job) -> list[tuple[int, int]]:
        """All attempts' ranks in order, as their logs are on disk."""
        folder = self._mirror.path(job.id, 1, 0).parent.parent.parent
        if not folder.is_dir():
            return []
        found = []
        for file in folder.glob("attempt_*/logs/rank_*.log"):
            found.append((int(file.parent.parent.name.split("_")[1]), int(file.stem.split("_")[1])))
        return sorted(found)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_READ)
    except FileNotFoundError as error:
        raise NotFound(f"{path} is gone") from error
