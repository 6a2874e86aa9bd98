"""What users and groups use: from the books of ended attempts, and what runs and waits now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from ugro.agent.engine.live_jobs import LiveJobs
from ugro.agent.tracking.scheduler_input import SchedulerInput
from ugro.core.job import Job
from ugro.core.quota import HOUR_S, WINDOWS_S
from ugro.core.support import clock
from ugro.core.support.moment import Instant, elapsed_s
from ugro.core.usage import Held, UsageReport, attempt_hours, gpu_part
from ugro.policy.quotas.report import Tally, Terms, group_rows, user_rows
from ugro.policy.training.energy import Price
from ugro.store.usage import Totals, UsageStore


@dataclass(frozen=True, slots=True)
class _Now:
    holding: list[Job]
    waiting: list[Job]
    totals: dict[str, Totals]  # by user, of attempts that have ended


class UsageService:
    def __init__(
        self, store: UsageStore, live: LiveJobs, scheduler_input: SchedulerInput, price: Callable[[], Price]
    ) -> None:
        self._store = store
        self._live = live
        self._books = scheduler_input.usage
        self._price = price

    async def report(self, since_unix_s: float, user: str | None = None) -> UsageReport:
        """``user``: that user alone, and the groups to which the user belongs."""
        first = int(max(0.0, since_unix_s) // HOUR_S)
        await self._books.read(clock.now())
        found = await self._look(first)
        await self._books.keep_up({*found.totals, *(job.user for job in (*found.holding, *found.waiting))})
        now, price = clock.now(), self._price()
        accounts = self._books.accounts(now)
        terms = Terms(accounts, now.boot_s, price.of)
        tallies = self._tallies(found, first, now, user)
        users = [row for row in user_rows(tallies, terms) if user in (None, row.name)]
        groups = [row for row in group_rows(tallies, terms, self._notes()) if user is None or user in row.members]
        return UsageReport(
            since=_at(first * HOUR_S),
            until=_at(now.wall_s),
            users=tuple(users),
            groups=tuple(groups),
            currency=None if price.per_kwh is None else price.currency,
            half_life_s=accounts.fair.half_life_s,
        )

    async def all_time(self) -> dict[str, Tally]:
        """By user: everything since these books are kept."""
        return self._tallies(await self._look(0), 0, clock.now())

    async def _look(self, first_hour: int) -> _Now:
        """All of one moment: what ends meanwhile is counted once."""
        await self._live.read()
        while True:
            released = self._live.released
            totals = await self._store.totals(first_hour)
            if released == self._live.released:
                return _Now(self._live.holding(), self._live.waiting(), totals)

    def _tallies(self, found: _Now, first_hour: int, now: Instant, user: str | None = None) -> dict[str, Tally]:
        tallies = {
            name: Tally(one.gpu_s, one.cpu_s, one.jobs, one.joules) for name, one in found.totals.items()
        }
        for name in {*self._books.quotas.users, *([user] if user else [])}:
            tallies.setdefault(name, Tally())
        for job in found.holding:
            self._add(tallies.setdefault(job.user, Tally()), job, first_hour, now)
        for job in found.waiting:
            tallies.setdefault(job.user, Tally()).queued += 1
        for name, average in self._books.averages(now).items():
            if name in tallies:
                tallies[name].average += average
        return tallies

    def _add(self, tally: Tally, job: Job, first_hour: int, now: Instant) -> None:
        started = job.attempt_started
        if job.placement is None or started is None:
            return
        held = Held.of(job.placement, gpu_part(job.spec.resources))
        hours = list(attempt_hours(job, now))
        lasts_s = sum(part.seconds for part in hours if part.hour >= first_hour)
        tally.gpu_s += held.gpus * lasts_s
        tally.cpu_s += held.cpus * lasts_s
        tally.gpus += held.gpus
        tally.cpus += held.cpus
        tally.jobs += job.attempt == 1 and (not hours or hours[0].hour >= first_hour)
        whole_s = elapsed_s(started, now)
        tally.average += self._books.fair.running(held.devices, whole_s)
        for limit, window_s in WINDOWS_S.items():
            tally.window_s[limit] = tally.window_s.get(limit, 0.0) + held.gpus * min(whole_s, window_s)

    def _notes(self) -> dict[str, str]:
        problems = {name: self._books.groups.problem(unix) for name, unix in self._books.unix_groups()}
        return {name: problem for name, problem in problems.items() if problem is not None}


def sums(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for one in tallies:
        total.gpu_s += one.gpu_s
        total.cpu_s += one.cpu_s
        total.jobs += one.jobs
        total.joules += one.joules
    return total


def _at(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="seconds")
