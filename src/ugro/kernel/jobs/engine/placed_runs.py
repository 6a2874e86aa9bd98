"""Which of the runs that nodes report are believed: looks up what was placed where, and asks ``rules.reported_run``.

A node that reports others is reported once, with an event; ``ugro health`` and ``ugro doctor`` show it as long as it
does so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from ugro.kernel.jobs.engine.plan import ranks_on
from ugro.kernel.jobs.engine.rules.reported_run import Belief, Recorded, Reported, StrangeRuns, Verdict, judge_run
from ugro.kernel.jobs.model import Job, JobSpec
from ugro.kernel.jobs.store import JobStore, Key
from ugro.kernel.links.model import Machine
from ugro.kernel.support.errors import UgroError

log = logging.getLogger(__name__)

_NO_RANKS = range(0)
# By a node's name and runs there that our records do not explain: the verdicts on those that were proven to be ours.
Prove = Callable[[str, Collection[Key]], Awaitable[dict[Key, Verdict]]]


@dataclass(frozen=True, slots=True)
class Sorted:
    belief: Belief
    reason: str
    ranks: range = _NO_RANKS  # that were placed there


class PlacedRuns:
    def __init__(self, jobs: JobStore, live: Callable[[int], Job | None] = lambda job: None) -> None:
        """``live`` returns a job that has not ended, from memory: most reports are about them."""
        self._jobs = jobs
        self._live = live
        self._told: set[str] = set()
        self.prove: Prove = _prove_nothing

    def known(self, node: str, machine: Machine | None, key: Key) -> Sorted | None:
        """Without asking the database: of an attempt that is under way."""
        job = self._live(key[0])
        if job is None or job.held is None or job.attempt != key[1]:
            return None
        return _sorted(Reported(node, machine, *key), Recorded(job.id, True, job.held), job.spec)

    async def sort(
        self, node: str, machine: Machine | None, keys: Collection[Key], *, may_prove: bool = False
    ) -> dict[Key, Sorted]:
        """``may_prove``: ask the node for tickets of runs that our records do not explain."""
        found = {key: known for key in keys if (known := self.known(node, machine, key)) is not None}
        missing = [key for key in keys if key not in found]
        if missing:
            recorded = await self._jobs.recorded(missing)
            for key in missing:
                run = recorded.runs.get(key)
                is_in_gap = not recorded.ids.were_given(key[0])
                what = Recorded(recorded.newest_job, run is not None, run.placement if run else None, is_in_gap)
                found[key] = _sorted(Reported(node, machine, *key), what, run.spec if run else None)
        strange = [key for key, one in found.items() if one.belief is Belief.STRANGE]
        for key, verdict in (await self.prove(node, strange)).items() if strange and may_prove else ():
            found[key] = Sorted(verdict.belief, verdict.reason)
        return found

    async def report(self, node: str, strange: StrangeRuns) -> None:
        """Once for each node, as long as this agent runs."""
        if node in self._told:
            return
        self._told.add(node)
        log.warning("%s; they are ignored", strange, extra={"node": node})
        try:
            await self._jobs.note("node", f"{strange}; they are ignored", node=node)
        except UgroError as error:
            log.error("this cannot be recorded: %s", error, extra={"node": node})


async def _prove_nothing(node: str, runs: Collection[Key]) -> dict[Key, Verdict]:
    return {}


def _sorted(reported: Reported, recorded: Recorded, spec: JobSpec | None) -> Sorted:
    verdict = judge_run(reported, recorded)
    if verdict.belief is not Belief.PLACED or spec is None or recorded.placement is None:
        return Sorted(verdict.belief, verdict.reason)
    return Sorted(verdict.belief, verdict.reason, ranks_on(spec, recorded.placement, reported.node))
