"""Between the scheduler's demands and quotas: what a job takes at least, and the demand that a quota leaves of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ugro.core.usage import Held, gpu_part
from ugro.policy.quotas.book import QuotaBook
from ugro.policy.quotas.pool import Ask, Caps, Earmark, Over, Taken
from ugro.policy.quotas.words import quota_of, waits
from ugro.policy.scheduling.cluster_view import ClusterView, Holding, Waiting
from ugro.policy.scheduling.decision import Start, Wait
from ugro.policy.scheduling.demand import Demand, Need
from ugro.policy.scheduling.waiting_jobs import Kind

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
