"""What nodes remember of jobs whose runs are gone: by their fences, which attempts ever came to them.

Fences carry no seal. So they count only where nothing else can tell: after a move, and when the user decides.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.errors import UgroError
from ugro.core.job import HOLDING_STATES, Job

log = logging.getLogger(__name__)

_AT_ONCE = 500


async def newest_attempts(
    watch: RunTracker, nodes: Iterable[str], jobs: Collection[int]
) -> tuple[dict[int, int], set[str]]:
    """By job, the newest attempt that ever came to one of the nodes; and the nodes that could not say it."""
    newest: dict[int, int] = {}
    silent: set[str] = set()
    wanted = sorted(jobs)
    for node in nodes:
        for first in range(0, len(wanted), _AT_ONCE):
            found = await _on_node(watch, node, wanted[first : first + _AT_ONCE])
            if found is None:
                silent.add(node)
                break
            for job, attempt in found.items():
                newest[job] = max(attempt, newest.get(job, 0))
    return newest, silent


def ended_since(watch: RunTracker, live: Sequence[Job], newest: Mapping[int, int]) -> dict[int, int]:
    """Of jobs that the state has as waiting or running: those that nodes have run to an end since, by attempt.

    ``newest``: by job, the newest attempt that ever came to a node.
    """
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


async def _on_node(watch: RunTracker, node: str, jobs: Sequence[int]) -> Mapping[int, int] | None:
    try:
        return (await watch.runs(node).tickets([], jobs)).started
    except UgroError as error:
        log.warning("the node cannot say which jobs it ran: %s", error, extra={"node": node})
        return None
