"""What users and groups have used, as rows: against their quotas, with what it cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ugro.core.quota import HOUR_S, WINDOWS_S, Limit, Pool
from ugro.core.usage import QuotaUse, UsageRow
from ugro.policy.quotas.accounts import Accounts

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
