"""Quotas: what users and groups may hold, use and submit. A limit that is None does not exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
WEEK_S = 7 * DAY_S


class Limit(StrEnum):
    """Named like the keys of the cluster file."""

    GPUS = "gpus"
    CPUS = "cpus"
    GPU_HOURS_PER_DAY = "gpu_hours_per_day"
    GPU_HOURS_PER_WEEK = "gpu_hours_per_week"
    QUEUED_JOBS = "queued_jobs"
    MAX_PRIORITY = "max_priority"
    MAX_TIME_LIMIT = "max_time_limit"


WINDOWS_S = {Limit.GPU_HOURS_PER_DAY: DAY_S, Limit.GPU_HOURS_PER_WEEK: WEEK_S}


@dataclass(frozen=True, slots=True)
class Limits:
    gpus: int | None = None  # held at once
    cpus: int | None = None  # held at once, by jobs without GPUs
    gpu_hours_per_day: float | None = None  # in the last 24 hours
    gpu_hours_per_week: float | None = None  # in the last 7 days
    queued_jobs: int | None = None
    max_priority: int | None = None
    max_time_limit: float | None = None  # in seconds

    def of(self, limit: Limit) -> float | None:
        found: float | None = getattr(self, limit.value)
        return found

    @property
    def given(self) -> Iterator[tuple[Limit, float]]:
        for limit in Limit:
            if (value := self.of(limit)) is not None:
                yield limit, value


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Pool:
    """Those who have limits together: a user alone, or the members of a group."""

    name: str
    limits: Limits
    members: frozenset[str]
    is_group: bool = False

    def __str__(self) -> str:
        return f"group {self.name}" if self.is_group else self.name


@dataclass(frozen=True, slots=True)
class Quotas:
    default: Limits = NO_LIMITS  # of each user who has none of its own
    users: Mapping[str, Limits] = field(default_factory=dict)
    groups: tuple[Pool, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.users or self.groups) or self.default != NO_LIMITS

    def pools_of(self, user: str) -> tuple[Pool, ...]:
        """A user's own limits, then those of the user's groups. All of them hold."""
        own = Pool(user, self.users.get(user, self.default), frozenset({user}))
        return (own, *(group for group in self.groups if user in group.members))


NO_QUOTAS = Quotas()
