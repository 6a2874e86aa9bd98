"""The scheduler's decisions about jobs. Each has a reason for users, with names and figures."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.job import Placement


@dataclass(frozen=True, slots=True)
class Start:
    job: int
    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop a running job so that another can start; it is queued again."""

    job: int
    for_job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    job: int
    reason: str
    blocked_by: tuple[int, ...] = ()  # the most important of the jobs that must end, start or stop first
    may_start_at: float | None = None  # at the latest, if no more urgent job is submitted; None: unknown
    wakes: tuple[str, ...] = ()  # the nodes that it would start on once they are awake
    quota: str | None = None  # the quota that it waits for, in words
    quota_until: float | None = None  # when that has room at the latest; None: unknown


Decision = Start | Preempt | Fail | Wait
