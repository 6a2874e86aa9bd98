"""What a quota can never allow, whatever else ends: it is refused as it is submitted, with what to ask for instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ugro.core.job import JobSpec
from ugro.core.quota import Limit, Pool, Quotas
from ugro.core.support.quantity import format_duration
from ugro.policy.quotas.pool import Ask, Over, PoolAccount
from ugro.policy.quotas.words import amount, quota_of
from ugro.policy.wording import count_of

_SEE = "see: ugro usage"
_ENDLESS = "it runs until it is stopped: ask who runs the cluster for a quota without max_time_limit"


@dataclass(frozen=True, slots=True)
class Refusal:
    text: str
    hint: str


def refusal(
    spec: JobSpec, user: str, asks: Sequence[Ask], quotas: Quotas, *, who: str = "the job", may_end: bool = True
) -> Refusal | None:
    """``asks``: the least of each alternative; one that fits is enough. ``may_end``: it could have a time limit."""
    for pool in quotas.pools_of(user):
        if (found := _of_spec(spec, pool, may_end)) is not None:
            return found
    overs = [next(_never(ask, user, quotas), None) for ask in asks]
    if not overs or any(over is None for over in overs):
        return None
    over = next(over for over in overs if over is not None)
    return _too_much(over, spec.time_limit_s is not None, who, may_end)


def queue_full(pools: Sequence[tuple[Pool, int]], new: int) -> Refusal | None:
    """``pools``: with how many jobs wait there now; ``new``: how many are submitted."""
    for pool, waiting in pools:
        most = pool.limits.queued_jobs
        if most is None or waiting + new <= most:
            continue
        text = f"quota {Limit.QUEUED_JOBS} of {pool}: {count_of(waiting, 'job')} of at most {most} already in the queue"
        if new > most:
            return Refusal(f"quota {Limit.QUEUED_JOBS} of {pool}: {new} jobs at once, of at most {most}", _SEE)
        return Refusal(text, "wait until some have started, or cancel some: ugro cancel JOB")
    return None


def _of_spec(spec: JobSpec, pool: Pool, may_end: bool) -> Refusal | None:
    limits = pool.limits
    if limits.max_priority is not None and spec.priority > limits.max_priority:
        text = f"quota {Limit.MAX_PRIORITY} of {pool}: priority {spec.priority}, and the highest is"
        return Refusal(f"{text} {limits.max_priority}", f"use --priority {limits.max_priority}")
    longest_s = limits.max_time_limit
    if longest_s is None or (spec.time_limit_s is not None and spec.time_limit_s <= longest_s):
        return None
    has = "it has no time limit" if spec.time_limit_s is None else f"time limit {format_duration(spec.time_limit_s)}"
    longest = format_duration(longest_s)
    text = f"quota {Limit.MAX_TIME_LIMIT} of {pool}: {has}, and the longest is {longest}"
    return Refusal(text, f"use --time-limit {longest.replace(' ', '')}" if may_end else _ENDLESS)


def _never(ask: Ask, user: str, quotas: Quotas) -> Iterator[Over]:
    """With nothing used, held or kept."""
    for pool in quotas.pools_of(user):
        yield from (over for over in PoolAccount(pool, (), 0.0).over(ask) if over.is_never)


def _too_much(over: Over, has_time_limit: bool, who: str, may_end: bool) -> Refusal:
    asked, most = amount(over.limit, over.asked), amount(over.limit, over.most)
    if over.limit in (Limit.GPUS, Limit.CPUS):
        option = "--gpus-per-node or --nodes" if over.limit is Limit.GPUS else "--cpus or --nodes"
        text = f"{quota_of(over)}: {who} needs {asked}, and the most is {most}"
        return Refusal(text, f"ask for less with {option}; {_SEE}")
    may_use = f"{who} may use {asked}" if has_time_limit else f"without a time limit {who} may use {asked}"
    text = f"{quota_of(over)}: {may_use}, and the most in any {_window(over.limit)} is {most}"
    if not may_end:
        return Refusal(text, f"ask for fewer GPUs; {_SEE}")
    return Refusal(text, f"give it a {'shorter ' * has_time_limit}--time-limit, or fewer GPUs; {_SEE}")


def _window(limit: Limit) -> str:
    return "24 hours" if limit is Limit.GPU_HOURS_PER_DAY else "7 days"
