"""What users have used lately, in memory: read once, then what has changed. For quotas and fair shares."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ugro.agent.tracking.cluster import Cluster
from ugro.agent.tracking.unix_groups import UnixGroups
from ugro.config.quotas import QuotaSection
from ugro.core.quota import HOUR_S, NO_QUOTAS, WEEK_S, WINDOWS_S, Quotas
from ugro.core.support.moment import Instant
from ugro.policy.quotas.accounts import Accounts, HourUse
from ugro.policy.quotas.fair_share import FairShare
from ugro.store.usage import UsageStore, UserHour

_HALF_LIVES = 8  # older use counts less than a two-hundredth


class UsageBook:
    def __init__(self, store: UsageStore, cluster: Cluster) -> None:
        self._store = store
        self._cluster = cluster
        self.groups = UnixGroups()
        self.seen = -1  # how many placements had ended when this was read
        self._hours: dict[str, dict[int, UserHour]] = {}  # by user and hour
        self._averages: dict[str, float] = {}  # by user, in devices, as of ``_at_s``
        self._at_s = 0.0
        self._changed = 0
        self._half_life_s = 0.0
        self._first = 0  # the oldest hour that is kept
        self._made: tuple[QuotaSection, int, Quotas] | None = None

    @property
    def quotas(self) -> Quotas:
        section = self._cluster.config.quotas
        if not section.given_keys:
            return NO_QUOTAS
        made = self._made
        if made is None or made[0] is not section or made[1] != self.groups.version:
            made = self._made = (section, self.groups.version, section.made_with(self.groups.members))
        return made[2]

    @property
    def fair(self) -> FairShare:
        return self._cluster.config.fair_share.made_share()

    async def keep_up(self, users: Iterable[str] = ()) -> None:
        """Who belongs to which group: of those who have used something, and of these."""
        await self.groups.keep_up(self._cluster.config.quotas.unix_groups, {*users, *self._hours})

    async def read(self, now: Instant) -> None:
        """What is new since the last time."""
        fair = self.fair
        if fair.half_life_s != self._half_life_s:
            self._hours, self._averages, self._changed = {}, {}, 0
            self._half_life_s = fair.half_life_s
        first = int((now.wall_s - max(WEEK_S, _HALF_LIVES * fair.half_life_s)) // HOUR_S)
        news = await self._store.newer(self._changed, first)
        self._averages = self._decayed(now.wall_s)
        self._at_s = now.wall_s
        for one in news:
            hours = self._hours.setdefault(one.user, {})
            known = hours.get(one.hour)
            hours[one.hour] = one
            new_s = one.device_s - (known.device_s if known is not None else 0.0)
            age_s = now.wall_s - (one.hour + 0.5) * HOUR_S
            self._averages[one.user] = self._averages.get(one.user, 0.0) + fair.decayed(new_s, age_s)
            self._changed = one.changed
        if first != self._first:
            self._first = first
            self._forget_before(first)

    def _forget_before(self, first: int) -> None:
        """Hours that no window and no average counts any more."""
        kept = {
            user: {hour: one for hour, one in hours.items() if hour >= first} for user, hours in self._hours.items()
        }
        self._hours = {user: hours for user, hours in kept.items() if hours}

    def accounts(self, now: Instant) -> Accounts:
        """As of now, by the clock of this boot."""
        quotas = self.quotas
        return Accounts(quotas, self.fair, self._windows(quotas, now), self._decayed(now.wall_s))

    def averages(self, now: Instant) -> dict[str, float]:
        return self._decayed(now.wall_s)

    def unix_groups(self) -> list[tuple[str, str]]:
        """The groups that are Unix groups: their own name, and that of the Unix group."""
        groups = self._cluster.config.quotas.groups.items()
        return [(name, one.unix_group) for name, one in groups if one.unix_group is not None]

    def _decayed(self, wall_s: float) -> dict[str, float]:
        if not self._averages:
            return {}
        left = math.exp2(-max(0.0, wall_s - self._at_s) / self._half_life_s)
        return {user: average * left for user, average in self._averages.items()}

    def _windows(self, quotas: Quotas, now: Instant) -> dict[str, tuple[HourUse, ...]]:
        """Of the last week, if some quota counts it."""
        limits = (quotas.default, *quotas.users.values(), *(group.limits for group in quotas.groups))
        if not any(one.of(limit) is not None for one in limits for limit in WINDOWS_S):
            return {}
        first = int((now.wall_s - WEEK_S) // HOUR_S)
        return {
            user: tuple(
                HourUse((hour + 1) * HOUR_S - now.offset_s, one.gpu_s)
                for hour, one in hours.items()
                if hour >= first and one.gpu_s
            )
            for user, hours in self._hours.items()
        }
