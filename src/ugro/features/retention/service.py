"""Removes ended jobs and their results as ``retention`` in the cluster file says, announced first and in small steps.

It runs beside everything else and nothing waits for it. ``rules`` decide.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from ugro.features.retention.config import RetentionSection
from ugro.features.retention.rules import EndedJob, Keep, Remove, Rule, What, decide, least_age_s
from ugro.features.retention.store import Due, Ended
from ugro.kernel.files.results.job_folder import has_results
from ugro.kernel.files.results.output_store import with_left
from ugro.kernel.jobs.model import Job
from ugro.kernel.store.database import Store
from ugro.kernel.support import moments as clock
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.errors import UgroError
from ugro.kernel.support.moments import Instant, shown_s
from ugro.kernel.support.quantities import count_of
from ugro.kernel.telemetry.metricstore import MetricStore

log = logging.getLogger(__name__)

_FIRST_S = 300.0  # after the agent has started: others are in more of a hurry
_EVERY_S = 3600.0
_ANNOUNCED_AT_ONCE = 500
_REMOVED_AT_ONCE = 20
_ROWS_AT_ONCE = 500
_EVENTS_OF_A_JOB = 10_000  # one that runs for months on a node that comes and goes has more
_PAUSE_S = 0.5  # between two steps
_AGAIN_S = 3600.0  # for results on a node that cannot be reached


class ResultRemover(Protocol):
    async def remove(self, job: Job, reason: str) -> tuple[str, ...]:
        """Returns what could not be done, in sentences."""
        ...

    async def remove_left(self, job: Job) -> tuple[str, ...]:
        """Only what is on the nodes."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What others say about removing."""

    may_remove: Callable[[], bool]  # whether this machine's clock is to be believed
    is_paused: Callable[[], bool]
    kept_environments: Callable[[], Awaitable[Collection[str]]]  # that nodes have, by name
    on_removed: Callable[[Sequence[int]], None]


class Retention:
    def __init__(
        self,
        folder: Path,
        store: Store,
        metrics: MetricStore,
        results: ResultRemover,
        settings: Callable[[], RetentionSection],
        limits: Limits,
    ) -> None:
        self._folder = folder
        self._store = store
        self._settings = settings
        self._limits = limits
        self._results = results
        self._metrics = metrics
        self.pause_s = _PAUSE_S

    async def run(self) -> None:
        pause_s = _FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _EVERY_S
            try:
                await self.look(clock.now())
            except (UgroError, OSError) as error:
                log.error("old jobs cannot be removed now: %s", error)

    async def look(self, now: Instant) -> None:
        """Announces what may go, and removes what was announced long enough ago."""
        if self._limits.is_paused():
            return
        if not self._limits.may_remove():
            log.info("nothing is removed for its age: this machine's clock was set")
            return
        rule = self._rule
        first_kept = await self._store.retention.first_kept(rule.keep)
        await self._announce(rule, first_kept, now)
        await self._remove_due(rule, first_kept, now)
        if rule.jobs_s is not None:
            # Those that belong to no job, such as alerts.
            before = _iso(now.wall_s - rule.jobs_s)
            await self._remove_rows(partial(self._store.retention.remove_events, before))
            await self._remove_resolutions(before)
        await self._remove_rows(partial(self._store.retention.trim_events, _EVENTS_OF_A_JOB))
        if (audit_s := self._settings().audit) is not None:
            await self._remove_rows(partial(self._store.audit.remove, _iso(now.wall_s - audit_s)))

    async def _remove_resolutions(self, before: str) -> None:
        """What requests for Python environments were resolved to, and nobody needs any more."""
        if await self._store.python_envs.has_unused(before):
            kept = await self._limits.kept_environments()
            await self._remove_rows(partial(self._store.python_envs.remove_unused, before, kept))

    @property
    def _rule(self) -> Rule:
        settings = self._settings()
        return Rule(settings.jobs, settings.keep, settings.results, settings.kept)

    async def _remove_rows(self, remove: Callable[[int], Awaitable[int]]) -> None:
        count = _ROWS_AT_ONCE
        while count == _ROWS_AT_ONCE:
            count = await remove(_ROWS_AT_ONCE)
            await asyncio.sleep(self.pause_s)

    # --- announcing --------------------------------------------------------------------------------------------

    async def _announce(self, rule: Rule, first_kept: int, now: Instant) -> None:
        age_s = least_age_s(rule)
        if age_s is None:
            return
        last, before, due_at = 0, _iso(now.wall_s - age_s), now.wall_s + self._settings().notice
        while found := await self._store.retention.ended(before, last, _ANNOUNCED_AT_ONCE):
            last = found[-1].id
            wanted: dict[tuple[What, str], list[int]] = {}
            for job, decision in await self._decided(found, rule, first_kept, now):
                if isinstance(decision, Remove):
                    wanted.setdefault((decision.what, decision.reason), []).append(job)
            for (what, reason), jobs in wanted.items():
                text = _announcement(what, jobs, reason, due_at)
                due = [Due(job, what) for job in jobs]
                await self._store.retention.announce(due, due_at, now.at, text)
                log.info("%s", text)
            await asyncio.sleep(self.pause_s)

    async def _decided(
        self, found: Sequence[Ended], rule: Rule, first_kept: int, now: Instant
    ) -> list[tuple[int, Remove | Keep]]:
        followed = await self._store.retention.followed()
        files = await asyncio.to_thread(self._files, found)
        return [
            (one.id, decide(_view(one, first_kept, one.id in followed, files.get(one.id), now), rule, now.wall_s))
            for one in found
        ]

    def _files(self, found: Iterable[Ended]) -> dict[int, bool]:
        """The jobs with results, and whether some are still on the nodes."""
        folders = {one.id: self._folder / str(one.id) for one in found if not one.are_results_removed}
        return {number: bool(with_left(folder)) for number, folder in folders.items() if has_results(folder)}

    # --- removing ----------------------------------------------------------------------------------------------

    async def _remove_due(self, rule: Rule, first_kept: int, now: Instant) -> None:
        while due := await self._store.retention.due(now.wall_s, _REMOVED_AT_ONCE):
            announced = {one.job: one.what for one in due}
            found = await self._store.retention.of(list(announced))
            await self._remove_files(sorted(announced.keys() - {one.id for one in found}))  # a crash came between
            begun = {one.id for one in found if one.are_results_removed and announced[one.id] == What.RESULTS}
            going = {
                (job, decision.what)
                for job, decision in await self._decided(found, rule, first_kept, now)
                if isinstance(decision, Remove) and decision.what == announced[job]
            }
            for job in sorted(begun | {job for job, what in going if what is What.RESULTS}):
                await self._remove_results(job, What.RESULTS, now)
            for job in sorted(job for job, what in going if what is What.LEFT):
                await self._remove_results(job, What.LEFT, now)
            await self._remove_jobs(sorted(job for job, what in going if what is What.JOB), now)
            await self._store.retention.withdraw(announced.keys() - begun - {job for job, _ in going})
            await asyncio.sleep(self.pause_s)

    async def _remove_results(self, number: int, what: What, now: Instant) -> None:
        job = await self._store.jobs.get(number)
        if what is What.LEFT:
            problems = await self._results.remove_left(job)
        else:
            problems = await self._results.remove(job, "removed as announced (retention.results)")
        for problem in problems:
            log.warning("%s; tried again in an hour", problem, extra={"job": number})
        if problems:
            await self._store.retention.postpone(number, now.wall_s + _AGAIN_S)
        else:
            await self._store.retention.withdraw([number])
            log.info("%s: removed as announced", _named(what, [number]), extra={"job": number})

    async def _remove_jobs(self, jobs: Sequence[int], now: Instant) -> None:
        if not jobs:
            return
        gone = await self._store.retention.remove(jobs, now.at, _removed)
        if gone:
            log.info("%s", _removed(gone))
        await self._remove_files(gone)
        await self._store.retention.withdraw(set(jobs) - set(gone))

    async def _remove_files(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            await to_the_end(partial(shutil.rmtree, self._folder / str(job), ignore_errors=True))
        await self._metrics.forget_jobs(jobs)
        self._limits.on_removed(jobs)
        await self._store.retention.withdraw(jobs)


def _view(one: Ended, first_kept: int, is_followed: bool, has_left: bool | None, now: Instant) -> EndedJob:
    """``has_left``: None if it has no results."""
    return EndedJob(
        one.id, one.state, shown_s(one.ended, now), one.id >= first_kept, has_left is not None, one.has_note,
        is_followed, one.is_source, one.is_pending, bool(has_left),
    )  # fmt: skip


def _announcement(what: What, jobs: Sequence[int], reason: str, due_at: float) -> str:
    verb = "is" if len(jobs) == 1 and what is What.JOB else "are"
    when = datetime.fromtimestamp(due_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{_named(what, jobs)} {verb} removed after {when}: {reason}; to keep one: ugro note JOB TEXT"


def _removed(jobs: Sequence[int]) -> str:
    return f"removed as announced: {_named(What.JOB, jobs)}"


def _named(what: What, jobs: Sequence[int]) -> str:
    """``3 jobs (1-2, 7)``."""
    count = count_of(len(jobs), "job")
    words = {What.RESULTS: f"the results of {count}", What.LEFT: f"the files left on nodes by {count}"}.get(what, count)
    return f"{words} ({', '.join(_ranges(sorted(jobs)))})"


def _ranges(numbers: Sequence[int]) -> Iterable[str]:
    first = last = numbers[0]
    for number in (*numbers[1:], -1):
        if number == last + 1:
            last = number
            continue
        yield str(first) if first == last else f"{first}-{last}"
        first = last = number


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
