"""Enforces quotas at a submission (``QuotaGate``), and reports what users and groups have used, use and wait for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from ugro.features.quotas.model import HOUR_S, WINDOWS_S, Pool, Quotas
from ugro.features.quotas.operations import GetUsage, Usage
from ugro.features.quotas.rules import Ask, Tally, Terms, group_rows, user_rows
from ugro.features.quotas.rules_room import Refusal, asks, queue_full, refusal
from ugro.features.training.rules_energy import Price
from ugro.kernel.access.model import Caller
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.model import Job, JobSpec
from ugro.kernel.jobs.moves import Totals, UsageStore
from ugro.kernel.jobs.records import Held, UsageReport, attempt_hours, gpu_part
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.operations.request import answers
from ugro.kernel.support import moments as clock
from ugro.kernel.support.errors import NotAllowed
from ugro.kernel.support.moments import Instant, elapsed_s
from ugro.kernel.telemetry.prometheus_text import Family

# --- quota gate -------------------------------------------------------------------------------------------------------
# Refuses submissions that a quota can never allow, and those for which the queue has no room.


Wanted = tuple[str, str]  # the user who submits, and the submission's key


class QuotaGate:
    def __init__(self, jobs: JobStore, live: LiveJobs, scheduler_input: SchedulerInput) -> None:
        self._jobs = jobs
        self._live = live
        self._scheduler_input = scheduler_input
        self._counting = asyncio.Lock()  # two submissions at once must not both get the last place

    async def check(self, wanted: Iterable[tuple[JobSpec, str]], *, may_end: bool = True) -> None:
        """Raises NotAllowed for a job that its user's quotas would never let start.

        ``may_end``: it could have a time limit, which is what the hint says.
        """
        wanted = list(wanted)
        quotas = await self._quotas(user for _, user in wanted)
        if not quotas:
            return
        # Those that are alike are checked once: a sweep may have thousands.
        keys = {(one.resources, one.launcher, one.priority, one.time_limit_s, user): one for one, user in wanted}
        for (*_, user), spec in keys.items():
            _refuse(refusal(spec, user, await self._least(spec), quotas, may_end=may_end))

    async def check_together(self, specs: Sequence[JobSpec], user: str, whose: str) -> None:
        """The same for jobs that are of use only if all of them run at once. ``whose``: what they are part of."""
        await self.check((spec, user) for spec in specs)
        if not (quotas := await self._quotas([user])):
            return
        least = [found[0] for spec in specs if (found := await self._least(spec))]
        if least:
            ends = [one.seconds for one in least]
            seconds = None if None in ends else max(one for one in ends if one is not None)
            total = Ask(sum(one.gpus for one in least), sum(one.cpus for one in least), seconds)
            _refuse(refusal(specs[0], user, [total], quotas, who=whose))

    async def _least(self, spec: JobSpec) -> list[Ask]:
        needs = await self._scheduler_input.possible_needs(spec)
        return asks(needs, spec.time_limit_s, spec.stop.grace_s)

    @asynccontextmanager
    async def room(self, wanted: Sequence[Wanted]) -> AsyncIterator[None]:
        """Raises NotAllowed if the queue has no room for all of them; nobody else takes it meanwhile."""
        users = {user for user, _ in wanted}
        pools = _limited_pools(await self._quotas(users), users)
        if not pools:
            yield
            return
        async with self._counting:
            await self._live.read()
            new = [user for user, key in wanted if await self._jobs.submitted(key) is None]
            waiting = Counter(job.user for job in self._live.waiting())
            for pool in pools:
                mine = sum(user in pool.members for user in new)
                if mine:
                    _refuse(queue_full([(pool, sum(waiting[user] for user in pool.members))], mine))
            yield

    async def _quotas(self, users: Iterable[str]) -> Quotas:
        await self._scheduler_input.usage.keep_up(users)
        return self._scheduler_input.usage.quotas


def _limited_pools(quotas: Quotas, users: set[str]) -> list[Pool]:
    found = {str(pool): pool for user in sorted(users) for pool in quotas.pools_of(user)} if quotas else {}
    return [pool for pool in found.values() if pool.limits.queued_jobs is not None]


def _refuse(found: Refusal | None) -> None:
    if found is not None:
        raise NotAllowed(found.text, hint=found.hint)


# --- usage ------------------------------------------------------------------------------------------------------------


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

    @answers(GetUsage)
    async def get_usage(self, asked: GetUsage, caller: Caller) -> Usage:
        return Usage(await self.report(asked.since, asked.user))

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


# --- usage figures ----------------------------------------------------------------------------------------------------
# What users have used, for Prometheus. Users who used little are one series: names are without end.


MOST_USERS = 200
OTHERS = "(others)"

_COUNTERS: tuple[tuple[str, str, Callable[[Tally], float]], ...] = (
    ("ugro_usage_gpu_seconds_total", "GPU-seconds that a user's jobs held.", lambda one: one.gpu_s),
    (
        "ugro_usage_cpu_seconds_total",
        "Core-seconds that a user's jobs held on nodes where they had no GPU.",
        lambda one: one.cpu_s,
    ),
    ("ugro_usage_energy_joules_total", "What a user's jobs used, where it is measured.", lambda one: one.joules),
    ("ugro_usage_jobs_total", "Jobs of a user that were started.", lambda one: one.jobs),
)


def of_usage(tallies: Mapping[str, Tally]) -> Iterator[Family]:
    shown = _bounded(tallies)
    for name, words, value in _COUNTERS:
        family = Family(name, "counter", words)
        for user, tally in shown.items():
            family.add(value(tally), user=user)
        yield family


def _bounded(tallies: Mapping[str, Tally]) -> dict[str, Tally]:
    if len(tallies) <= MOST_USERS:
        return dict(sorted(tallies.items()))
    order = sorted(tallies, key=lambda user: (-tallies[user].gpu_s, -tallies[user].cpu_s, user))
    first = {user: tallies[user] for user in sorted(order[: MOST_USERS - 1])}
    return {**first, OTHERS: sums(tallies[user] for user in order[MOST_USERS - 1 :])}
