"""Enforces quotas at a start: what one leaves of a demand. Says when a job is refused at once, and in which words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ugro.features.quotas.model import WINDOWS_S, Limit, Pool, Quotas
from ugro.features.quotas.rules import Accounts, Ask, Caps, Earmark, Over, PoolAccount, Taken
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.jobs.records import Held, gpu_part
from ugro.kernel.jobs.scheduling.demand import Demand, Need
from ugro.kernel.jobs.scheduling.model import ClusterView, Holding, Start, Wait, Waiting
from ugro.kernel.jobs.scheduling.queue import Kind
from ugro.kernel.support.quantities import count_of, format_duration, jobs

# --- book -------------------------------------------------------------------------------------------------------------
# The quotas in one pass of the scheduler: what each user may still take. Taking only ever leaves less.


_NEVER_KNOWN = float("inf")


class QuotaBook:
    def __init__(self, accounts: Accounts, taken: Iterable[Taken], now: float) -> None:
        self._accounts = accounts
        self._now = now
        self._pools: dict[str, PoolAccount] = {}
        self._of: dict[str, tuple[PoolAccount, ...]] = {}
        self._taken: dict[str, list[Taken]] = {}
        for one in sorted(taken):
            self._taken.setdefault(one.user, []).append(one)

    def caps(self, user: str, seconds: float | None) -> Caps:
        found = [account.caps(seconds) for account in self._accounts_of(user)]
        return Caps(min(one.gpus for one in found), min(one.cpus for one in found))

    def over(self, user: str, ask: Ask) -> Over | None:
        """The limit that it must wait for longest, if it would exceed any."""
        found = [one for account in self._accounts_of(user) for one in account.over(ask)]
        return max(found, key=_severity, default=None)

    def take(self, taken: Taken) -> None:
        """A job starts in this pass."""
        for account in self._accounts_of(taken.user):
            account.take(taken)
        self._taken.setdefault(taken.user, []).append(taken)

    def earmark(self, user: str, mark: Earmark, only: Pool | None = None) -> None:
        """Leaves room for a job; those behind it in the queue do not count on it. ``only``: in this pool alone."""
        for account in self._accounts_of(user):
            if only is None or account.pool is only:
                account.earmark(mark)

    def _accounts_of(self, user: str) -> tuple[PoolAccount, ...]:
        found = self._of.get(user)
        if found is None:
            pools = self._accounts.quotas.pools_of(user)
            found = self._of[user] = tuple(self._account(pool) for pool in pools)
        return found

    def _account(self, pool: Pool) -> PoolAccount:
        known = self._pools.get(str(pool))
        if known is None:
            past = (hour for member in pool.members for hour in self._accounts.hours.get(member, ()))
            known = self._pools[str(pool)] = PoolAccount(pool, past, self._now)
            for member in sorted(pool.members):
                for one in self._taken.get(member, ()):
                    known.take(one)
        return known


def _severity(over: Over) -> tuple[bool, float]:
    return (over.is_never, _NEVER_KNOWN if over.until is None else over.until)


# --- words ------------------------------------------------------------------------------------------------------------
# Quotas in words: what a job waits for, and why one is refused.


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


# --- refusal ----------------------------------------------------------------------------------------------------------
# What a quota can never allow, whatever else ends: it is refused as it is submitted, with what to ask for instead.


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


# --- quota room -------------------------------------------------------------------------------------------------------


# A job that a quota has held back for so long comes first among those who share that quota, or small jobs would keep a
# large one from ever starting.
PATIENCE_S = 3600.0


class QuotaRoom:
    """The quotas in one pass."""

    def __init__(self, view: ClusterView) -> None:
        self._now = view.now
        self._book = QuotaBook(view.accounts, (_taken(holder, view.now) for holder in view.holding), view.now)
        self._limited: dict[tuple[Demand, Caps], Demand | None] = {}

    def limited(self, user: str, kind: Kind, demand: Demand) -> Demand | Over:
        """The demand, with no more than the user may have; or the quota that the job waits for."""
        seconds = _seconds(kind)
        caps = self._book.caps(user, seconds)
        key = (demand, caps)
        if key not in self._limited:
            self._limited[key] = _limited(demand, caps)
        found = self._limited[key]
        if found is not None:
            return found
        overs = [self._book.over(user, ask(need, seconds)) for need in demand.needs]
        known = [over for over in overs if over is not None]
        return min(known, key=lambda over: over.is_never) if known else demand

    def started(self, job: Waiting, kind: Kind, start: Start) -> None:
        held = Held.of(start.placement, gpu_part(kind.resources))
        self._book.take(Taken(job.id, job.user, held.gpus, held.cpus, self._now, kind.end(self._now)))

    def reserved(self, job: Waiting, kind: Kind, demand: Demand, start: float | None) -> None:
        """Devices are kept for it: those behind it leave it its quota, too."""
        self._book.earmark(job.user, Earmark(job.id, ask(demand.needs[0], _seconds(kind)), start))

    def held_back(self, job: Waiting, kind: Kind, demand: Demand, over: Over) -> None:
        """It waits for a quota, and could run otherwise."""
        if not over.is_never and self._now - job.submitted_at >= PATIENCE_S:
            mark = Earmark(job.id, ask(demand.needs[0], _seconds(kind)), None)
            self._book.earmark(job.user, mark, over.pool)

    def wait(self, job: int, over: Over) -> Wait:
        by = over.by or ((over.first,) if over.first is not None else ())
        until = None if over.is_never else over.until
        return Wait(job, waits(over, self._now), by, quota=quota_of(over), quota_until=until)


def ask(need: Need, seconds: float | None) -> Ask:
    """The least that one alternative takes."""
    gpus, cpus = _unit(need)
    return Ask(gpus * need.min_nodes, cpus * need.min_nodes, seconds)


def asks(needs: Iterable[Need], time_limit_s: float | None, grace_s: float) -> list[Ask]:
    return [ask(need, None if time_limit_s is None else time_limit_s + grace_s) for need in needs]


def _limited(demand: Demand, caps: Caps) -> Demand | None:
    """The same object if nothing of it is too much."""
    needs = tuple(found for need in demand.needs if (found := _less(need, caps)) is not None)
    if not needs:
        return None
    is_same = len(needs) == len(demand.needs) and all(a is b for a, b in zip(needs, demand.needs, strict=True))
    return demand if is_same else Demand(needs)


def _less(need: Need, caps: Caps) -> Need | None:
    gpus, cpus = _unit(need)
    cap, unit = (caps.gpus, gpus) if gpus else (caps.cpus, float(cpus))
    if not unit or cap == math.inf:
        return need
    nodes = min(need.max_nodes, max(0, math.floor(cap / unit)))
    if nodes < need.min_nodes:
        return None
    if need.wants_all_gpus:
        return replace(need, max_nodes=nodes, most_gpus=math.floor(cap / nodes), _fitting={})
    return need if nodes == need.max_nodes else replace(need, max_nodes=nodes, _fitting={})


def _unit(need: Need) -> tuple[float, int]:
    """The GPUs of a node at least, and the cores of a node without GPUs."""
    if need.least_gpus:
        return need.least_gpus * gpu_part(need.resources), 0
    return 0.0, 1 if need.cpus is None else need.cpus


def _seconds(kind: Kind) -> float | None:
    return None if kind.time_limit_s is None else kind.time_limit_s + kind.grace_s


def _taken(holder: Holding, now: float) -> Taken:
    held = Held.of(holder.placement, holder.gpu_part)
    started = now if holder.started_at is None else holder.started_at
    return Taken(holder.id, holder.user, held.gpus, held.cpus, started, holder.end(now))
