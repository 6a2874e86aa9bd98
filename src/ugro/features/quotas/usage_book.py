"""What users have used lately, in memory: read once, then what has changed. For quotas and fair shares."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import math
import pwd
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ugro.features.quotas.config import FairShareSection, QuotaSection
from ugro.features.quotas.model import HOUR_S, NO_QUOTAS, WEEK_S, WINDOWS_S, Quotas
from ugro.features.quotas.rules import Accounts, FairShare, HourUse
from ugro.kernel.jobs.moves import UsageStore, UserHour
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.support.moments import Instant

# --- unix groups ------------------------------------------------------------------------------------------------------
# The members of Unix groups of this machine. They are looked up in a thread: they may come from a slow directory.
#
# A directory that does not answer looks like one that has no such group or user. So what was known once counts until
# the directory says something else: an outage must not lift the quotas of a group.


log = logging.getLogger(__name__)

_EVERY_S = 60.0
_FIRST_S = 5.0  # how long a pass waits for groups and users that were never looked up


@dataclass(frozen=True, slots=True)
class UnixGroup:
    number: int
    listed: frozenset[str]


def _group(name: str) -> UnixGroup | None:
    try:
        found = grp.getgrnam(name)
    except (KeyError, ValueError):
        return None
    return UnixGroup(found.gr_gid, frozenset(found.gr_mem))


def _primary_group(user: str) -> int | None:
    """Asked of each user: many directories do not list all of theirs."""
    try:
        return pwd.getpwnam(user).pw_gid
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Directory:
    group: Callable[[str], UnixGroup | None] = _group
    primary_group: Callable[[str], int | None] = _primary_group


class UnixGroups:
    def __init__(self, directory: Directory | None = None) -> None:
        self._directory = directory or Directory()
        self._groups: dict[str, UnixGroup | None] = {}  # None: there is no such group
        self._primary: dict[str, int | None] = {}  # by user
        self._gone: frozenset[str] = frozenset()  # groups that were there once
        self._looked_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.version = 0  # grows with every change

    def members(self, name: str) -> frozenset[str]:
        """Those that the group lists; and of the users that have asked for something, those whose own group it is."""
        group = self._groups.get(name)
        if group is None:
            return frozenset()
        return group.listed | {user for user, number in self._primary.items() if number == group.number}

    def problem(self, name: str) -> str | None:
        if name in self._groups and self._groups[name] is None:
            return f"there is no Unix group {name}"
        return f"the Unix group {name} is not found any more; its last members count" if name in self._gone else None

    async def keep_up(self, names: Collection[str], users: Iterable[str] = ()) -> None:
        """Looks them up again now and then. Only those that are new are waited for, and not for long."""
        if not names:
            return
        wanted = {*users}
        for _ in range(2):  # one that is under way may be about others
            is_new = not (self._groups.keys() >= {*names} and self._primary.keys() >= wanted)
            now = asyncio.get_running_loop().time()
            if self._task is None and (is_new or now - self._looked_at > _EVERY_S):
                self._looked_at = now
                look = self._look(frozenset(names), wanted | self._primary.keys())
                self._task = asyncio.create_task(look, name="members of Unix groups")
            if not is_new or self._task is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    await asyncio.shield(self._task)

    async def _look(self, names: frozenset[str], users: Collection[str]) -> None:
        try:
            groups, primary = await asyncio.to_thread(self._found, names, users)
            gone = frozenset(name for name, found in groups.items() if found is None and self._groups.get(name))
            for name in gone - self._gone:
                log.warning("quotas: the Unix group %s is not found any more: its last members count", name)
            for name in groups.keys() - self._groups.keys():
                if groups[name] is None:
                    log.warning("quotas: there is no Unix group %s on this machine", name)
            known = {name: found or self._groups.get(name) for name, found in groups.items()}
            own = {user: self._primary.get(user) if number is None else number for user, number in primary.items()}
            if (known, own, gone) != (self._groups, self._primary, self._gone):
                self._groups, self._primary, self._gone = known, own, gone
                self.version += 1
        finally:
            self._task = None

    def _found(
        self, names: frozenset[str], users: Collection[str]
    ) -> tuple[dict[str, UnixGroup | None], dict[str, int | None]]:
        """Blocks."""
        groups = {name: self._directory.group(name) for name in sorted(names)}
        return groups, {user: self._directory.primary_group(user) for user in sorted(users)}


# --- usage book -------------------------------------------------------------------------------------------------------


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
        section = self._cluster.config.section(QuotaSection)
        if not section.given_keys:
            return NO_QUOTAS
        made = self._made
        if made is None or made[0] is not section or made[1] != self.groups.version:
            made = self._made = (section, self.groups.version, section.made_with(self.groups.members))
        return made[2]

    @property
    def fair(self) -> FairShare:
        return self._cluster.config.section(FairShareSection).made_share()

    async def keep_up(self, users: Iterable[str] = ()) -> None:
        """Who belongs to which group: of those who have used something, and of these."""
        await self.groups.keep_up(self._cluster.config.section(QuotaSection).unix_groups, {*users, *self._hours})

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
        groups = self._cluster.config.section(QuotaSection).groups.items()
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
