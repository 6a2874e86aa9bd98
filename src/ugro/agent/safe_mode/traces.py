"""What nodes remember of jobs whose runs are gone: by their fences, which attempts ever came to them.

Fences carry no seal. So they count only where nothing else can tell: after a move, and when the user decides.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.errors import UgroError
from ugro.core.job import HOLDING_STATES, Job

log = logging.getLogger(__name__)

_AT_ONCE = 500


async def newest_attempts(watch: RunTracker, jobs: Collection[int]) -> dict[int, int]:
    """By job, the newest attempt that ever came to some node that answers."""
    newest: dict[int, int] = {}
    wanted = sorted(jobs)
    for one in watch.sightings():
        for first in range(0, len(wanted), _AT_ONCE):
            for job, attempt in await _on_node(watch, one.node, wanted[first : first + _AT_ONCE]):
                newest[job] = max(attempt, newest.get(job, 0))
    return newest


async def ended_since(watch: RunTracker, live: Sequence[Job]) -> dict[int, int]:
    """Of jobs that the state has as waiting or running: those that nodes have run to an end since, by attempt."""
    newest = await newest_attempts(watch, {job.id for job in live})
    # A run that came and is gone was removed, and that is done when its end is recorded.
    return {
        job.id: attempt
        for job in live
        if (attempt := newest.get(job.id, 0)) > job.attempt
        or (attempt == job.attempt and job.state in HOLDING_STATES and is_gone(watch, job))
    }


def is_gone(watch: RunTracker, job: Job) -> bool:
    """Every node of it answers, and none has a trace of it."""
    nodes = job.placement.nodes if job.placement else ()
    reached = all(watch.state(node, job.id, job.attempt).is_reachable for node in nodes)
    return reached and all(watch.status(node, job.id, job.attempt) is None for node in nodes)


async def _on_node(watch: RunTracker, node: str, jobs: Sequence[int]) -> list[tuple[int, int]]:
    try:
        answer = await watch.runs(node).tickets([], jobs)
    except UgroError as error:
        log.warning("the node cannot say which jobs it ran: %s", error, extra={"node": node})
        return []
    return list(answer.started.items())
