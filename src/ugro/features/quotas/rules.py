"""Decides by past use and limits: fair shares of users; an account for each pool during a pass; and the report.

GPU-hours are checked before a job starts and never by stopping one. So that no window of a day or a week ever has more
than its limit, a running job counts with all that it may still use: up to its time limit, or, without one, for the
whole window.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ugro.features.quotas.model import HOUR_S, NO_QUOTAS, WINDOWS_S, Limit, Pool, Quotas
from ugro.kernel.jobs.records import QuotaUse, UsageRow

# --- fair share -------------------------------------------------------------------------------------------------------
# How much of the cluster each user has had lately: in devices, averaged with weights that halve every half-life.
#
# A user who held 2 devices for ever has an average of 2; one who held them for a half-life and then nothing, for
# another half-life, has 0.5. So what was used and what is held now are in the same unit, and can be added.


WEEK_S = 7 * 86400.0
# A job that none of its user's older jobs has overtaken for this part of a half-life is not put behind for past use.
_FADES_WITHIN = 1 / 7
_STEP = 0.05  # averages that differ by less than this part of a device are equal: then the older job is first


@dataclass(frozen=True, slots=True)
class FairShare:
    half_life_s: float = WEEK_S
    weights: Mapping[str, float] = field(default_factory=dict)  # by user; others have 1

    def weight(self, user: str) -> float:
        return self.weights.get(user, 1.0)

    def decayed(self, device_s: float, age_s: float) -> float:
        """The part of an average that use of so long ago has; ``age_s``: of the middle of that time."""
        return device_s * math.exp2(-max(0.0, age_s) / self.half_life_s) * math.log(2) / self.half_life_s

    def running(self, devices: float, lasts_s: float) -> float:
        """The same of use that lasts until now."""
        return devices * -math.expm1(-math.log(2) * max(0.0, lasts_s) / self.half_life_s)

    def standing(self, average: float, waited_s: float) -> float:
        """What counts of an average for a job that has waited so long for its turn."""
        left = max(0.0, 1 - waited_s / (self.half_life_s * _FADES_WITHIN))
        return math.floor(average * left / _STEP) * _STEP


# --- accounts ---------------------------------------------------------------------------------------------------------
# What the scheduler knows about users: their quotas, their weights, and what they have used. Times as in its view.


class HourUse(NamedTuple):
    """GPU-seconds of attempts that have ended, within an hour."""

    end: float  # of the hour
    gpu_s: float


@dataclass(frozen=True, slots=True)
class Accounts:
    quotas: Quotas = NO_QUOTAS
    fair: FairShare = field(default_factory=FairShare)
    hours: Mapping[str, tuple[HourUse, ...]] = field(default_factory=dict)  # by user, of the last week
    averages: Mapping[str, float] = field(default_factory=dict)  # by user, in devices, of ended attempts

    def with_use(self, user: str, end: float, gpu_s: float) -> Accounts:
        """The same after another attempt has ended. All of its use counts as of its last hour: a cautious forecast."""
        if not self.quotas or not gpu_s:
            return self
        new = HourUse(end + HOUR_S, gpu_s)
        return replace(self, hours={**self.hours, user: (*self.hours.get(user, ()), new)})


NO_ACCOUNTS = Accounts()


# --- pool -------------------------------------------------------------------------------------------------------------


_ENDLESS = float("inf")
_ROUNDING = 1e-6  # of a GPU: sums of fractions


class Ask(NamedTuple):
    """The least that a job takes."""

    gpus: float  # a job that shares a GPU with others counts as a part of it
    cpus: int  # of a job without GPUs
    seconds: float | None  # None: it has no time limit


class Taken(NamedTuple):
    """What a running job has."""

    job: int
    user: str
    gpus: float
    cpus: int
    started: float
    end: float | None  # at the latest; None: not known


class Earmark(NamedTuple):
    """Room in a quota that is left for a job which is before others in the queue."""

    job: int
    ask: Ask
    start: float | None  # when it can start at the latest; None: not known


class Caps(NamedTuple):
    """The most that a job may take."""

    gpus: float = _ENDLESS
    cpus: float = _ENDLESS




@dataclass(frozen=True, slots=True)
class Over:
    """A limit that a job would exceed."""

    pool: Pool
    limit: Limit
    most: float
    used: float  # also what is promised
    asked: float
    until: float | None = None  # when there is room at the latest; None: not known
    by: tuple[int, ...] = ()  # the jobs that must end first
    endless: tuple[int, ...] = ()  # those of them without a time limit
    first: int | None = None  # a job that is before it in the queue, for which the room is left

    @property
    def is_never(self) -> bool:
        """It asks for more than the whole limit."""
        return self.asked > self.most + _ROUNDING


class PoolAccount:
    def __init__(self, pool: Pool, past: Iterable[HourUse], now: float) -> None:
        self.pool = pool
        self._now = now
        self._past = tuple(past)
        self._taken: list[Taken] = []  # the first to end first
        self._leaves: dict[Limit, list[tuple[float, float, int]]] = {}
        self._earmarks: list[Earmark] = []
        self._gpus = 0.0
        self._cpus = 0
        self._gpu_s = {limit: self._past_s(limit) for limit in WINDOWS_S if pool.limits.of(limit) is not None}

    def take(self, taken: Taken) -> None:
        insort(self._taken, taken, key=_by_end)
        self._leaves.clear()
        self._gpus += taken.gpus
        self._cpus += taken.cpus
        for limit in self._gpu_s:
            self._gpu_s[limit] += self._charge(taken, limit)

    def earmark(self, mark: Earmark) -> None:
        self._earmarks.append(mark)

    def caps(self, seconds: float | None) -> Caps:
        """For a job that ends within so many seconds."""
        limits, marks = self.pool.limits, self._marks(seconds)
        gpus = cpus = _ENDLESS
        if limits.gpus is not None:
            gpus = limits.gpus - self._gpus - sum(mark.ask.gpus for mark in marks)
        if limits.cpus is not None:
            cpus = limits.cpus - self._cpus - sum(mark.ask.cpus for mark in marks)
        for limit in self._gpu_s:
            gpus = min(gpus, self._free_s(limit) / _lasts(seconds, limit))
        return Caps(gpus + _ROUNDING, cpus)

    def over(self, ask: Ask) -> Iterator[Over]:
        """The limits that it would exceed now."""
        limits = self.pool.limits
        marks = self._marks(ask.seconds)
        if ask.gpus and limits.gpus is not None:
            marked = sum(mark.ask.gpus for mark in marks)
            yield from self._over_now(Limit.GPUS, limits.gpus, ask.gpus, marked, marks)
        if ask.cpus and limits.cpus is not None:
            marked = sum(mark.ask.cpus for mark in marks)
            yield from self._over_now(Limit.CPUS, limits.cpus, ask.cpus, marked, marks)
        for limit in self._gpu_s if ask.gpus else ():
            yield from self._over_window(limit, ask)

    def _over_now(
        self, limit: Limit, most: float, asked: float, marked: float, marks: list[Earmark]
    ) -> Iterator[Over]:
        is_gpus = limit is Limit.GPUS
        used = self._gpus if is_gpus else self._cpus
        lack = used + marked + asked - most
        if lack <= _ROUNDING:
            return
        if lack - marked <= _ROUNDING:  # without the others that wait there would be room
            yield Over(self.pool, limit, most, used, asked, first=marks[0].job)
            return
        ending: list[Taken] = []
        for taken in self._taken:
            amount = taken.gpus if is_gpus else taken.cpus
            if lack <= _ROUNDING:
                break
            if amount:
                ending.append(taken)
                lack -= amount
        by, endless = tuple(one.job for one in ending), tuple(one.job for one in ending if one.end is None)
        first = marks[0].job if marks else None
        until = ending[-1].end if ending and not endless and lack <= _ROUNDING else None
        yield Over(self.pool, limit, most, used, asked, until, by, endless, first)

    def _over_window(self, limit: Limit, ask: Ask) -> Iterator[Over]:
        most = _whole(self.pool.limits.of(limit)) * HOUR_S
        asked = ask.gpus * _lasts(ask.seconds, limit)
        if self._free_s(limit) + _ROUNDING >= asked:
            return
        marked = most - self._free_s(limit) - self._gpu_s[limit]
        first = self._earmarks[0].job if self._earmarks and self._gpu_s[limit] + asked <= most + _ROUNDING else None
        until, by = self._room_again(limit, most - asked - marked)
        yield Over(
            self.pool, limit, most / HOUR_S, (most - self._free_s(limit)) / HOUR_S, asked / HOUR_S, until, by,
            tuple(one.job for one in self._taken if one.end is None and one.gpus), first,
        )  # fmt: skip

    def _room_again(self, limit: Limit, most_s: float) -> tuple[float | None, tuple[int, ...]]:
        """When no more than ``most_s`` is charged at the latest, and whose running jobs that waits for."""
        charged, by = self._gpu_s[limit], list[int]()
        for at, amount, job in self._leaving(limit):
            charged -= amount
            by += [job] if job else []
            if charged <= most_s + _ROUNDING:
                return at, tuple(by)
        return None, tuple(by)

    def _leaving(self, limit: Limit) -> list[tuple[float, float, int]]:
        """When what is charged leaves the window at the latest, how much, and of which running job, in order."""
        if limit not in self._leaves:
            window_s = WINDOWS_S[limit]
            found = [(hour.end + window_s, hour.gpu_s, 0) for hour in self._past if hour.end + window_s > self._now]
            found += [
                # It is on the books with whole hours.
                (one.end + window_s + HOUR_S, self._charge(one, limit), one.job)
                for one in self._taken
                if one.end is not None and one.gpus
            ]
            self._leaves[limit] = sorted(found, key=lambda one: (one[0], one[2]))
        return self._leaves[limit]

    def _free_s(self, limit: Limit) -> float:
        marked = sum(mark.ask.gpus * _lasts(mark.ask.seconds, limit) for mark in self._earmarks)
        return _whole(self.pool.limits.of(limit)) * HOUR_S - self._gpu_s[limit] - marked

    def _past_s(self, limit: Limit) -> float:
        """An hour counts until all of it is out of the window."""
        return math.fsum(hour.gpu_s for hour in self._past if hour.end + WINDOWS_S[limit] > self._now)

    def _charge(self, taken: Taken, limit: Limit) -> float:
        window_s = WINDOWS_S[limit]
        if taken.end is None:
            return taken.gpus * window_s
        so_far_s = min(window_s, max(0.0, self._now - taken.started))
        return taken.gpus * min(window_s, so_far_s + max(0.0, taken.end - self._now))

    def _marks(self, seconds: float | None) -> list[Earmark]:
        """Of those that such a job would be in the way of: not if it has ended before they start."""
        end = None if seconds is None else self._now + seconds
        return [mark for mark in self._earmarks if end is None or mark.start is None or end > mark.start]


def _lasts(seconds: float | None, limit: Limit) -> float:
    """How much of a window such a job can fill."""
    window_s = WINDOWS_S[limit]
    return window_s if seconds is None else max(1.0, min(seconds, window_s))


def _whole(value: float | None) -> float:
    assert value is not None
    return value


def _by_end(taken: Taken) -> tuple[float, int]:
    return (_ENDLESS if taken.end is None else taken.end, taken.job)


# --- report -----------------------------------------------------------------------------------------------------------
# What users and groups have used, as rows: against their quotas, with what it cost.


_J_PER_WH = 3600.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What the use is compared with. ``now``: by the clock of the accounts."""

    accounts: Accounts
    now: float
    cost: Callable[[float], float | None]  # of joules


@dataclass(slots=True)
class Tally:
    """What one user used since a time, and has now."""

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    jobs: int = 0
    joules: float = 0.0
    gpus: float = 0.0
    cpus: int = 0
    queued: int = 0
    average: float = 0.0
    window_s: dict[Limit, float] = field(default_factory=dict)  # GPU-seconds of running attempts, by window



def user_rows(tallies: Mapping[str, Tally], terms: Terms) -> list[UsageRow]:
    """Who used most first."""
    rows = []
    for user, tally in tallies.items():
        pool = terms.accounts.quotas.pools_of(user)[0]
        row = _row(pool, [tally], terms)
        rows.append(replace(row, average=tally.average, weight=terms.accounts.fair.weight(user)))
    return sorted(rows, key=_most_first)


def group_rows(tallies: Mapping[str, Tally], terms: Terms, notes: Mapping[str, str]) -> list[UsageRow]:
    """``notes``: what is wrong with groups, by name."""
    rows = []
    for group in sorted(terms.accounts.quotas.groups, key=lambda group: group.name):
        row = _row(group, [tally for user, tally in tallies.items() if user in group.members], terms)
        rows.append(replace(row, members=tuple(sorted(group.members)), note=notes.get(group.name)))
    return rows


def _row(pool: Pool, found: Sequence[Tally], terms: Terms) -> UsageRow:
    joules = math.fsum(one.joules for one in found)
    return UsageRow(
        name=pool.name,
        jobs=sum(one.jobs for one in found),
        gpu_hours=math.fsum(one.gpu_s for one in found) / HOUR_S,
        cpu_hours=math.fsum(one.cpu_s for one in found) / HOUR_S,
        energy_wh=joules / _J_PER_WH,
        cost=terms.cost(joules),
        gpus=math.fsum(one.gpus for one in found),
        cpus=sum(one.cpus for one in found),
        queued=sum(one.queued for one in found),
        quota=tuple(QuotaUse(limit, most, _used(limit, found, pool, terms)) for limit, most in pool.limits.given),
    )


def _used(limit: Limit, tallies: Sequence[Tally], pool: Pool, terms: Terms) -> float | None:
    if limit in WINDOWS_S:
        hours = (hour for member in pool.members for hour in terms.accounts.hours.get(member, ()))
        ended_s = math.fsum(hour.gpu_s for hour in hours if hour.end + WINDOWS_S[limit] > terms.now)
        return (ended_s + math.fsum(one.window_s.get(limit, 0.0) for one in tallies)) / HOUR_S
    values: dict[Limit, Callable[[Tally], float]] = {
        Limit.GPUS: lambda one: one.gpus,
        Limit.CPUS: lambda one: one.cpus,
        Limit.QUEUED_JOBS: lambda one: one.queued,
    }
    value = values.get(limit)
    return None if value is None else math.fsum(value(one) for one in tallies)


def _most_first(row: UsageRow) -> tuple[float, float, str]:
    return (-row.gpu_hours, -row.cpu_hours, row.name)
