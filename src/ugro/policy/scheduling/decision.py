"""What the scheduler wants done with a job, and why. Each reason is a sentence for people, with names and figures."""

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
    """End a running job so that another can start; it is to be tried again later."""

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
    blocked_by: tuple[int, ...] = ()  # jobs that must end, start or stop first; the ones that matter most
    may_start_at: float | None = None  # at the latest, if nothing more urgent comes; None: nobody knows


Decision = Start | Preempt | Fail | Wait
