"""Trainings that go on without ranks that are lost: what their nodes say of each rank, told and acted upon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Sequence

from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.errors import NotFound, RemoteFailure, TimedOut, Unreachable
from ugro.core.job import Job, JobState
from ugro.nodes.runs import RankRecord, RunStatus
from ugro.policy.elastic import standing
from ugro.policy.elastic.standing import ElasticView, RankState, RankView, Rejoin
from ugro.policy.lifecycle.attempt import NodeRun, RunState
from ugro.store.jobs import JobStore
from ugro.workloads.planning import ranks_on

log = logging.getLogger(__name__)

EVENT = "elastic"
_AGAIN_S = 1.0
_GOING_ON = frozenset({JobState.RUNNING, JobState.UNREACHABLE})

Key = tuple[int, int]


class ElasticRuns:
    def __init__(self, jobs: JobStore, watch: RunTracker) -> None:
        self._jobs = jobs
        self._watch = watch
        self._told: dict[Key, str | None] = {}  # what the event log says of attempts
        self._lost_at: dict[tuple[int, int, int, int], float] = {}  # by rank and how often that was started

    def view(self, job: Job, runs: Sequence[NodeRun]) -> ElasticView | None:
        elastic = job.spec.elastic
        if elastic.min_ranks is None or job.placement is None:
            return None
        ranks = tuple(one for run in runs for one in self._ranks(job, run))
        return ElasticView(elastic.min_ranks, elastic.rejoins, ranks, self._members(job, ranks))

    def news(self, job: Job, view: ElasticView | None) -> Awaitable[None] | None:
        """The event to record, if something has changed."""
        if view is None or job.state not in _GOING_ON or view.among(RankState.UNHEARD):
            return None
        return self._tell(job, standing.described(view))

    def forget_all_but(self, under_way: set[Key]) -> None:
        self._told = {key: text for key, text in self._told.items() if key in under_way}
        self._lost_at = {key: at for key, at in self._lost_at.items() if key[:2] in under_way}

    async def rejoin(self, job: Job, wanted: Rejoin) -> None:
        """Ordered until the node says that it has started: an order that comes twice is one."""
        try:
            await self._watch.runs(wanted.node).start_again(job.id, job.attempt, wanted.rank, wanted.starts)
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            more = {"job": job.id, "node": wanted.node}
            log.warning("rank %d cannot be started again yet: %s", wanted.rank, error, extra=more)
        await asyncio.sleep(_AGAIN_S)

    def _tell(self, job: Job, text: str | None) -> Awaitable[None] | None:
        key = (job.id, job.attempt)
        before, self._told[key] = self._told.get(key), text
        if text == before:
            return None
        return self._note(job, text or "every rank trains again")

    async def _note(self, job: Job, text: str) -> None:
        """An agent before us may have told it."""
        last = [one for one in await self._jobs.events(job=job.id, limit=100_000) if one.kind == EVENT]
        if not last or (last[-1].attempt, last[-1].text) != (job.attempt, text):
            await self._jobs.note(EVENT, text, job=job)

    # --- each rank ----------------------------------------------------------------------------------------------

    def _ranks(self, job: Job, run: NodeRun) -> Iterator[RankView]:
        assert job.placement is not None
        status = self._watch.status(run.node, job.id, job.attempt)
        for rank in ranks_on(job.spec, job.placement, run.node):
            yield self._rank(job, run, rank, status)

    def _rank(self, job: Job, run: NodeRun, rank: int, status: RunStatus | None) -> RankView:
        if status is not None and status.has_ended:
            return _ended(run.node, rank, next((one for one in status.ranks if one.rank == rank), None))
        if run.is_gone:
            return RankView(rank, run.node, RankState.LOST, "its node is lost")
        if not run.is_reachable or run.state is RunState.UNKNOWN:
            is_unheard = run.node in self._watch.unheard()
            return RankView(rank, run.node, RankState.UNHEARD if is_unheard else RankState.UNKNOWN)
        if run.state in _WHY:
            return RankView(rank, run.node, RankState.LOST, _WHY[run.state])
        lost = next((one for one in (status.lost if status else ()) if one.rank == rank), None)
        if lost is None:
            starts = 1 + max((key[3] for key in self._lost_at if key[:3] == (job.id, job.attempt, rank)), default=0)
            return RankView(rank, run.node, RankState.RUNNING, starts=starts)
        now = asyncio.get_running_loop().time()
        lost_s = now - self._lost_at.setdefault((job.id, job.attempt, rank, lost.starts), now)
        return RankView(rank, run.node, RankState.LOST, _how(lost), lost.starts, can_start=True, lost_s=lost_s)

    def _members(self, job: Job, ranks: Sequence[RankView]) -> frozenset[int]:
        nodes = {one.rank: one.node for one in ranks}
        said = {node: self._watch.status(node, job.id, job.attempt) for node in set(nodes.values())}
        groups = {node: (one.group, one.members) for node, one in said.items() if one is not None and one.members}
        return standing.members(groups, nodes)


def _ended(node: str, rank: int, record: RankRecord | None) -> RankView:
    if record is None:
        return RankView(rank, node, RankState.LOST, "how it ended is not known")
    if record.code == 0:
        return RankView(rank, node, RankState.DONE)
    return RankView(rank, node, RankState.LOST, _how(record))


def _how(record: RankRecord) -> str:
    if record.is_oom:
        return "out of memory"
    return f"signal {record.signal}" if record.signal is not None else f"exit code {record.code}"


_WHY = {
    RunState.ABSENT: "its node knows nothing of it any more",
    RunState.DEAD: "its supervisor is gone",
    RunState.FAILED: "it did not start",
}
