"""Quotas in words: what a job waits for, and why one is refused."""

from __future__ import annotations

from ugro.core.quota import WINDOWS_S, Limit
from ugro.core.support.quantity import format_duration
from ugro.policy.quotas.pool import Over
from ugro.policy.wording import count_of, jobs

_WINDOW_WORDS = {Limit.GPU_HOURS_PER_DAY: "the last 24 hours", Limit.GPU_HOURS_PER_WEEK: "the last 7 days"}


def quota_of(over: Over) -> str:
    """``quota gpus of ann``"""
    return f"quota {over.limit} of {over.pool}"


def waits(over: Over, now: float) -> str:
    """The reason of a job that waits for it."""
    if over.is_never:
        needs = f"the job needs {amount(over.limit, over.asked)}, and the most is {amount(over.limit, over.most)}"
        return f"{quota_of(over)}: {needs}; it starts only if the quota is raised"
    return f"{quota_of(over)}: {_state(over)}; {_until(over, now)}"


def amount(limit: Limit, value: float) -> str:
    if limit in WINDOWS_S:
        return f"{figure(value)} GPU-hours"
    thing = "GPU" if limit is Limit.GPUS else "core"
    return count_of(int(value), thing) if value == int(value) else f"{figure(value)} of a {thing}"


def figure(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 1000 else f"{value:,.0f}"


def _state(over: Over) -> str:
    used, most = figure(over.used), figure(over.most)
    if over.limit in WINDOWS_S:
        window = _WINDOW_WORDS[over.limit]
        asked = figure(over.asked)
        return f"{used} of {most} GPU-hours of {window} are used or kept for running jobs, and the job may use {asked}"
    thing = "GPUs" if over.limit is Limit.GPUS else "cores"
    return f"{used} of {most} {thing} are in use, and the job needs {figure(over.asked)}"


def _until(over: Over, now: float) -> str:
    if over.first is not None and not over.by:
        return f"the rest is left for job {over.first}, which comes first"
    if over.until is not None:
        wait = f"for {format_duration(max(0.0, over.until - now))} at most"
        return f"waits for {jobs(over.by)}, {wait}" if over.by and over.limit not in WINDOWS_S else f"waits {wait}"
    if over.endless:
        have = "has" if len(over.endless) == 1 else "have"
        return f"unknown for how long, because {jobs(over.endless)} {have} no time limit"
    return "unknown for how long"
