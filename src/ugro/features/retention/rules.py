"""Which ended jobs are removed, or only their results, and why. Everything else is kept, with its reason.

A job goes when it ended long enough ago, is not among the newest, and left no results. Results go by their own rule,
which is off unless it is set: UGRO does not delete what was collected unless it was asked to. Files that were left on
the nodes go earlier: they take up space that other jobs need.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.kernel.jobs.model import FINAL_STATES, JobState
from ugro.kernel.support.quantities import format_duration


@dataclass(frozen=True, slots=True)
class Rule:
    jobs_s: float | None  # None: jobs are kept forever
    keep: int  # the newest ended jobs stay, however old they are
    results_s: float | None  # None: results are kept forever, and the jobs that made them
    kept_s: float | None = None  # None: what was left on the nodes is kept as long as the results


@dataclass(frozen=True, slots=True)
class EndedJob:
    id: int
    state: JobState
    ended_s: float
    is_newest: bool = False  # among the newest ended jobs, as many as the rule keeps
    has_results: bool = False  # outputs or checkpoints
    has_note: bool = False  # a note or a tag
    is_followed: bool = False  # a job that has not ended runs after it
    is_source: bool = False  # the result cache made another job point to its results
    is_pending: bool = False  # a checkpoint of it is still being collected
    has_left: bool = False  # files on the nodes


class What(StrEnum):
    JOB = "job"  # its record, events, logs and metrics
    RESULTS = "results"
    LEFT = "kept"  # files that were left on the nodes


@dataclass(frozen=True, slots=True)
class Remove:
    what: What
    reason: str


@dataclass(frozen=True, slots=True)
class Keep:
    reason: str


def decide(job: EndedJob, rule: Rule, now_s: float) -> Remove | Keep:
    if (reason := _needed(job)) is not None:
        return Keep(reason)
    if job.has_results:
        decision = _by_age(What.RESULTS, job, rule.results_s, now_s)
        if isinstance(decision, Keep) and job.has_left:
            return _by_age(What.LEFT, job, rule.kept_s, now_s)
        return decision
    if job.is_newest:
        return Keep(f"it is among the newest {rule.keep}")
    return _by_age(What.JOB, job, rule.jobs_s, now_s)


def least_age_s(rule: Rule) -> float | None:
    """No job that ended more recently is ever removed; None if none is at all."""
    ages = (rule.jobs_s, rule.results_s, rule.kept_s)
    return min((age_s for age_s in ages if age_s is not None), default=None)


def _needed(job: EndedJob) -> str | None:
    if job.state not in FINAL_STATES:
        return f"it is {job.state}"
    if job.is_pending:
        return "a checkpoint of it is still being collected"
    if job.has_note:
        return "it has a note or a tag"
    if job.is_followed:
        return "a job that has not ended runs after it"
    return "another job points to its results" if job.is_source else None


def _by_age(what: What, job: EndedJob, limit_s: float | None, now_s: float) -> Remove | Keep:
    name = "jobs" if what is What.JOB else what.value
    if limit_s is None:
        return Keep(f"retention.{name} is not set")
    if now_s - job.ended_s <= limit_s:
        return Keep(f"it ended less than {format_duration(limit_s)} ago")
    return Remove(what, f"ended more than {format_duration(limit_s)} ago (retention.{name})")
