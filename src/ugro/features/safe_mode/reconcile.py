"""Ends safe mode as the user decides: the state catches up with the world, or the world goes back to the state.

``adopt`` is one transaction. ``forget`` first ends runs, each with proof, and then is one transaction: what was cut
short is done again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from ugro.features.safe_mode.model import Reconciliation
from ugro.features.safe_mode.operations import PreviewReconciliation, ReconcileAgent
from ugro.features.safe_mode.records import is_gone
from ugro.features.safe_mode.rules import Change, End, Entry, Found, JobView, adopt, described, forget
from ugro.features.safe_mode.service import SafeModeControl
from ugro.kernel.access.model import Caller
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.model import FINAL_STATES, HOLDING_STATES, Job, JobState
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.operations.request import answers
from ugro.kernel.store.standing import Decision
from ugro.kernel.support.errors import NotAllowed, NotFound
from ugro.kernel.support.process import point
from ugro.kernel.support.quantities import names

log = logging.getLogger(__name__)

_LIVE = frozenset(JobState) - FINAL_STATES
_GRACE_S = 5.0


class Reconciler:
    def __init__(
        self,
        jobs: JobStore,
        watch: RunTracker,
        control: SafeModeControl,
        on_decided: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_decided`` is called when every node obeys this agent again."""
        self._jobs = jobs
        self._watch = watch
        self._control = control
        self._on_decided = on_decided
        self._deciding = asyncio.Lock()

    @answers(PreviewReconciliation)
    async def plan(self, asked: PreviewReconciliation, caller: Caller) -> Reconciliation:
        """What each decision would do now. Changes nothing."""
        self._expect_safe_mode()
        views = await self._views()
        adopted = adopt(views, self._control.not_asked())
        return await self._said(None, adopted, forget(views), self._control.generation + 1)

    @answers(ReconcileAgent)
    async def decide(self, asked: ReconcileAgent, caller: Caller) -> Reconciliation:
        is_forgotten = asked.how == "forget"
        async with self._deciding:
            generation = await self._take_over(asked.skip_unreachable)
            views = await self._views()
            self._expect_asked(asked.skip_unreachable)
            changes = forget(views) if is_forgotten else adopt(views, self._control.not_asked())
            adopted, forgotten = ((), changes) if is_forgotten else (changes, ())
            done = await self._said(asked.how, adopted, forgotten, generation)
            if is_forgotten:
                await asyncio.gather(*(self._end(change) for change in changes if isinstance(change, End)))
            point("reconcile.planned")
            await self._decide(changes, done, is_forgotten=is_forgotten)
            return done

    # --- what is known ---------------------------------------------------------------------------------------------

    async def _views(self) -> list[JobView]:
        """Of every job that has come further than the state says."""
        live = {job.id: job for job in await self._jobs.in_states(_LIVE)}
        runs: dict[int, list[Found]] = {}
        for found in self._control.found():
            runs.setdefault(found.job.id, []).append(found)
        entries = await self._entries(list(live.values()), runs)
        started = await self._started(list(live.values()), runs) if entries is None else {}
        entries = entries or {}
        numbers = sorted({*runs, *entries, *started})
        return [
            JobView(
                number,
                live.get(number) or await self._known(number),
                entries.get(number),
                tuple(runs.get(number, ())),
                started.get(number, 0),
            )
            for number in numbers
        ]

    async def _entries(self, live: Sequence[Job], found: Collection[int]) -> dict[int, Entry] | None:
        """None: there is no journal of the time after this state was saved."""
        records = self._control.records
        if records is None or not records.is_complete:
            return None
        numbers = await self._jobs.standing.numbers()
        return await asyncio.to_thread(lambda: dict(records.newer_entries(numbers, live, found)))

    async def _started(self, live: Sequence[Job], found: Collection[int]) -> dict[int, int]:
        """By job, the newest attempt that some node remembers, if that is gone or newer than the state says."""
        newest = await self._control.newest_attempts({*found, *(job.id for job in live)})
        gone = {
            job.id
            for job in live
            if newest.get(job.id, 0) > job.attempt or (job.state in HOLDING_STATES and is_gone(self._watch, job))
        }
        return {number: newest.get(number, 0) for number in {*found, *gone}}

    async def _known(self, number: int) -> Job | None:
        try:
            return await self._jobs.get(number)
        except NotFound:
            return None

    # --- deciding --------------------------------------------------------------------------------------------------

    async def _take_over(self, skips_unasked: bool) -> int:
        """From now on nodes obey us and the agent after us, and no start that an agent before us sent.

        Only what they say then is all that they run. Returns our generation.
        """
        self._expect_asked(skips_unasked)
        generation = self._control.generation + 1
        await self._jobs.standing.raise_generation(generation)
        self._watch.identity.generation = generation
        await self._control.examine_all()
        self._expect_asked(skips_unasked)
        return generation

    async def _end(self, change: End) -> None:
        for node, attempt in change.runs:
            await self._watch.runs(node).stop(change.job, attempt, "forgotten by its agent", _GRACE_S)

    async def _said(
        self, done: str | None, adopted: Sequence[Change], forgotten: Sequence[Change], generation: int
    ) -> Reconciliation:
        words = (described(adopted), described(forgotten))
        not_asked, absent = self._control.not_asked(), self._control.absent()
        return Reconciliation(done, *words, await self._ids() + 1, generation, not_asked, absent)

    async def _ids(self) -> int:
        records = self._control.records
        here = await asyncio.to_thread(lambda: records.highest if records else 0)
        return max(self._control.ids, here)

    async def _decide(self, changes: Sequence[Change], done: Reconciliation, *, is_forgotten: bool) -> None:
        word = "forgotten" if is_forgotten else "adopted"
        text = f"safe mode is over: what is newer than the state was {word}; ids begin at {done.first_id}"
        decision = Decision(tuple(changes), done.generation, done.first_id - 1, is_forgotten, text)
        await self._jobs.standing.decide(decision)
        point("reconcile.recorded")
        self._watch.identity.generation = done.generation
        await self._control.note_left()
        self._watch.ask_again()
        self._on_decided()

    def _expect_safe_mode(self) -> None:
        if not self._control.is_on:
            raise NotAllowed(
                "the agent is not in safe mode: there is nothing to reconcile", hint="see: ugro agent status"
            )

    def _expect_asked(self, skips_unasked: bool) -> None:
        self._expect_safe_mode()
        missing = self._control.not_asked()
        if missing and not skips_unasked:
            raise NotAllowed(f"not every node has said what it runs: {names(missing)}", hint=self._hint())

    def _hint(self) -> str:
        skip = "go on without them: --skip-unreachable"
        if absent := self._control.absent():
            return f"not in this cluster: {names(absent)}; add them to the cluster file, or if they are gone, {skip}"
        return f"wait until they answer (ugro health), or {skip}"
