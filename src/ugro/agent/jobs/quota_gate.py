"""Refuses submissions that a quota can never allow, and those for which the queue has no room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from ugro.agent.engine.live_jobs import LiveJobs
from ugro.agent.tracking.scheduler_input import SchedulerInput
from ugro.core.errors import NotAllowed
from ugro.core.job import JobSpec
from ugro.core.quota import Pool, Quotas
from ugro.policy.quotas.pool import Ask
from ugro.policy.quotas.refusal import Refusal, queue_full, refusal
from ugro.policy.scheduling.quota_room import asks
from ugro.store.jobs import JobStore

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
