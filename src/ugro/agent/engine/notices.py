"""What is to be known of an attempt besides its state, as its ranks and supervisors say it; and events of it."""

from __future__ import annotations

from collections.abc import Awaitable

from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.job import Job, JobState
from ugro.store.jobs import JobStore

EVENT = "notice"
_MOST = 4
_GOING_ON = frozenset({JobState.RUNNING, JobState.UNREACHABLE})


class RunNotices:
    def __init__(self, jobs: JobStore, watch: RunTracker) -> None:
        self._jobs = jobs
        self._watch = watch
        self._told: dict[tuple[int, int], int] = {}  # how many the event log has of an attempt

    def of(self, job: Job) -> tuple[str, ...]:
        """Several ranks may say the same."""
        nodes = job.placement.nodes if job.placement else ()
        known = [self._watch.status(node, job.id, job.attempt) for node in nodes]
        return tuple(dict.fromkeys(text for one in known if one is not None for text in one.notices))[:_MOST]

    def news(self, job: Job) -> Awaitable[None] | None:
        """The event to record, if there is a new one. That a text changes, such as a count in it, is no event."""
        found, key = self.of(job), (job.id, job.attempt)
        if job.state not in _GOING_ON or len(found) <= self._told.get(key, 0):
            return None
        self._told[key] = len(found)
        return self._note(job, found)

    def forget_all_but(self, under_way: set[tuple[int, int]]) -> None:
        self._told = {key: count for key, count in self._told.items() if key in under_way}

    async def _note(self, job: Job, found: tuple[str, ...]) -> None:
        """An agent before us may have told some."""
        events = await self._jobs.events(job=job.id, limit=100_000)
        told = [one for one in events if one.kind == EVENT and one.attempt == job.attempt]
        for text in found[len(told) :]:
            await self._jobs.note(EVENT, text, job=job)


def with_notices(text: str, notices: tuple[str, ...]) -> str:
    return "; ".join([text, *notices])
