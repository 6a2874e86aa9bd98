"""Notices that nodes or this machine know more than the state, and keeps the agent in safe mode until it is decided.

Evidence counts only with our seal: a node that lies cannot put the cluster into safe mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ugro.features.safe_mode.model import REMEDY, Mark, NewerRun, SafeMode
from ugro.features.safe_mode.records import Comparison, Records, ended_since, newest_attempts, read_mark, write_mark
from ugro.features.safe_mode.rules import Found, older_than_mark
from ugro.kernel.access.model import node_of
from ugro.kernel.jobs.engine.plan import read_ticket
from ugro.kernel.jobs.engine.rules.reported_run import Belief, Verdict, judge_ticket
from ugro.kernel.jobs.engine.run_tracker import RunTracker, Sighting
from ugro.kernel.jobs.engine.runs import Held
from ugro.kernel.jobs.model import FINAL_STATES, Job, JobState
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.store.standing import AHEAD
from ugro.kernel.support.codec import DecodeError, decode, dumps
from ugro.kernel.support.errors import InSafeMode, NotFound, RemoteFailure, TimedOut, UgroError, Unreachable

log = logging.getLogger(__name__)

_EXAMINE_S = 1.0
_MOST_REASONS = 10
_MOST_PROVEN = 1000
_UNCHECKED = "the records beside the state are missing: every node is asked whether it knows more"
_MOVED = "the state came from another machine or folder: every node is asked whether it knows more"
# An agent that was left behind gets a higher generation with every start. It must not catch up with this one.
_GENERATIONS_AHEAD = 1000


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What was seen; kept in the state, so that a restart stays in safe mode."""

    since: str
    reasons: tuple[str, ...]
    generation: int = 0
    ids: int = 0
    is_certain: bool = True  # False: nothing is known to be newer, and not every node was asked


async def begin(control: SafeModeControl, records: Records, compared: Comparison) -> None:
    """Before anything is started: in safe mode if the state is an older one, or cannot be told from one."""
    await control.load(records)
    if compared.reasons:
        await control.enter(compared.reasons, compared.mark)
    elif not compared.is_checked:
        await control.enter_unchecked(compared.mark, is_moved=compared.is_moved)
    elif not control.is_on:
        # First: ids that are reserved without records would look like records that were lost.
        await control.leave_marks()
        await control.reserve_first()
        await control.leave_marks()
        await control.settle()


async def is_known_old(jobs: JobStore) -> bool:
    """Whether an agent before this one has found that the state is an older one."""
    evidence = await _recorded(jobs)
    return evidence is not None and evidence.is_certain


async def _recorded(jobs: JobStore) -> _Evidence | None:
    if (document := await jobs.standing.safe_mode()) is not None:
        with contextlib.suppress(ValueError, DecodeError):
            return decode(_Evidence, json.loads(document))
    return None


class SafeModeControl:
    def __init__(self, jobs: JobStore, watch: RunTracker) -> None:
        self._jobs = jobs
        self._watch = watch
        self._identity = watch.identity
        self._records: Records | None = None
        self._evidence: _Evidence | None = None
        self._found: dict[tuple[str, int, int], Found] = {}
        self._reserved = 0
        self._nodes: frozenset[str] = frozenset()  # which may know what became of the state's jobs
        self._seen: dict[str, Sighting] = {}  # marks that were looked at, by node
        self._examined: dict[str, float] = {}  # when, by node
        self._marked: dict[str, Mark | None] = {}  # what each node has of ours
        self._marked_here: Mark | None = None
        self._are_marks_old = False
        self._has_taken_over = False

    # --- the state of it -------------------------------------------------------------------------------------------

    async def load(self, records: Records | None = None) -> None:
        """Before anything is started."""
        self._records = records
        self._evidence = await _recorded(self._jobs)
        self._reserved = (await self._jobs.standing.numbers()).reserved
        self._nodes = await self._jobs.standing.nodes()

    @property
    def is_on(self) -> bool:
        return self._evidence is not None

    @property
    def records(self) -> Records | None:
        return self._records

    def check(self, what: str) -> None:
        """Raises ``InSafeMode``. ``what``: what is refused, as in "nothing is started"."""
        if self._evidence is not None:
            raise InSafeMode(f"the agent is in safe mode, {what}: {self._evidence.reasons[0]}", hint=REMEDY)

    def status(self) -> SafeMode | None:
        if self._evidence is None:
            return None
        found = self._evidence
        runs = (NewerRun(one.node, one.job.id, one.job.attempt, one.job.spec.name, one.status) for one in self.found())
        ids = max(found.ids, self._reserved)
        return SafeMode(
            found.since, found.reasons, tuple(runs), found.generation, ids, self.not_asked(), self.absent()
        )

    def found(self) -> list[Found]:
        return [self._found[key] for key in sorted(self._found)]

    def not_asked(self) -> tuple[str, ...]:
        """Nodes and logins of which is not known what they run. Those that refuse us tell it all the same."""
        unknown = (one.node for one in self._watch.sightings() if one.node not in self._examined)
        return tuple(sorted([*self.absent(), *(name for name in unknown if not self._watch.has_no_account(name))]))

    def absent(self) -> tuple[str, ...]:
        """Nodes that may know what became of the state's jobs, and are not in the cluster: nobody can ask them."""
        return tuple(sorted(self._nodes - self._cluster_nodes()))

    def _cluster_nodes(self) -> frozenset[str]:
        return frozenset(node_of(one.node) for one in self._watch.sightings())

    def leased(self) -> list[Job]:
        """Jobs that the state does not know: what keeps them alive goes on."""
        return [found.job for found in self._found.values()] if self.is_on else []

    @property
    def generation(self) -> int:
        """The highest that was seen."""
        return max(self._identity.generation, self._evidence.generation if self._evidence else 0)

    @property
    def ids(self) -> int:
        """Ids up to this one may have been given, by whatever state."""
        found = max((one.job.id for one in self._found.values()), default=0)
        return max(self._reserved, found, self._evidence.ids if self._evidence else 0)

    # --- how it begins ---------------------------------------------------------------------------------------------

    async def enter(self, reasons: Iterable[str], mark: Mark | None = None, *, is_certain: bool = True) -> None:
        """Durable when this returns. More evidence is added to what is known."""
        known = self._evidence or _Evidence(datetime.now(UTC).isoformat(timespec="seconds"), (), is_certain=False)
        before = known.reasons if known.is_certain else ()
        news = [reason for reason in dict.fromkeys(reasons) if reason not in before]
        evidence = replace(
            known,
            reasons=(*before, *news)[:_MOST_REASONS],
            generation=max(known.generation, mark.generation if mark else 0),
            ids=max(known.ids, mark.ids if mark else 0),
            is_certain=known.is_certain or is_certain,
        )
        if evidence == self._evidence:
            return
        self._evidence = evidence  # first: nothing is begun while it is written down
        for reason in news:
            log.error("safe mode: %s", reason)
        await self._jobs.standing.enter(dumps(evidence), f"safe mode: {'; '.join(news)}" if news else None)

    async def enter_unchecked(self, mark: Mark | None, *, is_moved: bool = False) -> None:
        """It ends by itself when every node was asked, unless one of them knows more."""
        await self.enter([_MOVED if is_moved else _UNCHECKED], mark, is_certain=False)

    async def reserve_first(self) -> None:
        """Of a state that never reserved ids: folders of jobs that it does not know may be there all the same."""
        if not self._reserved:
            here = await asyncio.to_thread(lambda: self._records.highest if self._records else 0)
            self._reserved = (await self._jobs.standing.reserve(here)).reserved

    async def settle(self) -> None:
        """The state is used here from now on; not before a move was looked into, however often the agent ends."""
        if self._records is not None:
            await self._jobs.standing.settle(self._records.place)

    # --- marks -----------------------------------------------------------------------------------------------------

    def note(self, job: Job) -> None:
        """Every durable change of a job comes by here."""
        if self._records is not None:
            self._records.journal.note(job)
        self._are_marks_old = self._are_marks_old or job.id + AHEAD > self._reserved

    def _note_all(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.note(job)

    def has_news(self) -> bool:
        """Whether a node has answered, come or gone, or ids were reserved, since marks were compared. Costs little."""
        if self._are_marks_old or any(self._seen.get(one.node) is not one for one in self._answered()):
            return True
        return not self.is_on and self._nodes != self._cluster_nodes()

    async def compare_marks(self) -> None:
        """A mark of ours on a node that is newer than our state shows that ours is an older one."""
        answered = self._answered()
        own = await self._own_mark()  # read after the nodes': theirs are never ahead of it
        for one in answered:
            if self._seen.get(one.node) is one:
                continue
            self._seen[one.node] = one
            mark = read_mark(self._identity.key, self._identity.agent, one.mark)
            if mark is not None and (reasons := older_than_mark(own, mark, one.node)):
                await self.enter(reasons, mark)
            self._marked[one.node] = mark
        await self._keep_nodes()

    async def _keep_nodes(self) -> None:
        """Before a job is placed on them. Not in safe mode: those of the state have to be asked, whatever is here."""
        names = self._cluster_nodes()
        if not self.is_on and names != self._nodes:
            await self._jobs.standing.keep_nodes(names)
            self._nodes = names

    async def leave_marks(self) -> None:
        """On this machine and on every node that answers. Not in safe mode: marks are evidence."""
        if self.is_on or not self._identity.key:
            return
        own = await self._mark_here()
        nodes = [one.node for one in self._answered() if one.refusal is None and self._marked.get(one.node) != own]
        await asyncio.gather(*(self._leave_mark(node, own) for node in nodes))

    async def _mark_here(self) -> Mark:
        own = await self._own_mark()
        self._are_marks_old = False
        if self._records is not None and own != self._marked_here:
            is_written = await asyncio.to_thread(self._records.write, own)
            self._marked_here = own if is_written else None
        return own

    def _answered(self) -> list[Sighting]:
        return [one for one in self._watch.sightings() if one.has_answered]

    async def _own_mark(self) -> Mark:
        self._reserved = (await self._jobs.standing.numbers()).reserved
        return Mark(self._identity.agent, self._identity.generation, self._reserved)

    async def _leave_mark(self, node: str, mark: Mark) -> None:
        try:
            await self._watch.runs(node).put_mark(write_mark(self._identity.key, mark))
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            log.info("the node gets our mark when it answers again: %s", error, extra={"node": node})
        else:
            self._marked[node] = mark

    # --- tickets ---------------------------------------------------------------------------------------------------

    async def examine(self) -> None:
        """In safe mode, again and again: which of our runs the nodes have that the state does not know."""
        now = time.monotonic()
        due = [one.node for one in self._answered() if now - self._examined.get(one.node, float("-inf")) > _EXAMINE_S]
        await asyncio.gather(*(self._examine(node, admits=False) for node in due))
        if self._evidence is not None and not self._evidence.is_certain and not self.not_asked():
            await self._leave_unchecked()

    async def examine_all(self) -> None:
        """Every node is asked again, and obeys no older generation from then on. What does not answer is not asked."""
        nodes = [one.node for one in self._answered()]
        asked = await asyncio.gather(*(self._examine(node, admits=True) for node in nodes))
        now = time.monotonic()
        self._examined = {node: now for node, is_asked in zip(nodes, asked, strict=True) if is_asked}

    async def _examine(self, node: str, *, admits: bool) -> bool:
        try:
            tickets = await self._watch.runs(node).tickets(None, admits=admits)
            there = {(node, int(one.job), one.attempt) for one in tickets.held if one.job.isdigit()}
            self._found = {key: one for key, one in self._found.items() if key[0] != node or key in there}
            await self._take_up(node, tickets.held)
        except UgroError as error:
            log.info("the node cannot say what it runs: %s", error, extra={"node": node})
            return False
        self._examined[node] = time.monotonic()
        return True

    async def prove(self, node: str, runs: Collection[tuple[int, int]]) -> dict[tuple[int, int], Verdict]:
        """Verdicts on those of the runs on a node whose tickets are ours. One that is newer begins safe mode."""
        if not self._identity.key:
            return {}
        try:
            tickets = await self._watch.runs(node).tickets([f"{job}.{attempt}" for job, attempt in runs][:_MOST_PROVEN])
            return await self._take_up(node, tickets.held)
        except UgroError as error:
            log.info("the node shows no tickets: %s", error, extra={"node": node})
            return {}

    async def _take_up(self, node: str, held: Iterable[Held]) -> dict[tuple[int, int], Verdict]:
        ids = (await self._jobs.standing.numbers()).ids
        verdicts: dict[tuple[int, int], Verdict] = {}
        for one in held:
            if (job := self._proven(node, one)) is None:
                continue
            verdict = judge_ticket(job.id, job.attempt, await self._known_attempt(job.id), ids)
            verdicts[job.id, job.attempt] = verdict
            if verdict.belief is Belief.NEWER:
                self._found[node, job.id, job.attempt] = Found(node, job, one.status)
                await self.enter([f"{node} has attempt {job.attempt} of job {job.id}, which the state does not know"])
        return verdicts

    def _proven(self, node: str, held: Held) -> Job | None:
        """The job of a run, if its ticket is ours, and is for this run on this node."""
        job = read_ticket(self._identity.key, self._identity.agent, held.ticket)
        if job is None or (str(job.id), job.attempt) != (held.job, held.attempt):
            return None
        return job if job.placement is not None and node in job.placement.nodes else None

    async def _known_attempt(self, job: int) -> int | None:
        try:
            return (await self._jobs.get(job)).attempt
        except NotFound:
            return None

    # --- how it ends -----------------------------------------------------------------------------------------------

    async def _leave_unchecked(self) -> None:
        """If no node knows more, nor did while the one before us could still act.

        Ids that were reserved are not given again all the same: some may have been given.
        """
        if await self._may_know_more():
            return
        await self._take_over()
        if self._is_certain or self.not_asked() or await self._may_know_more():
            return
        here = await asyncio.to_thread(lambda: self._records.highest if self._records else 0)
        await self._jobs.standing.reserve(max(self.ids, here))
        await self._jobs.standing.leave("safe mode is over: every node was asked, and none knows more than the state")
        await self.note_left()
        self._watch.ask_again()  # with our new generation

    async def _take_over(self) -> None:
        """From now on nodes obey no agent with an older copy of this state, however often it is started again."""
        if not self._has_taken_over:
            self._has_taken_over = True
            generation = self.generation + _GENERATIONS_AHEAD
            await self._jobs.standing.raise_generation(generation)
            self._identity.generation = generation
        await self.examine_all()

    async def _may_know_more(self) -> bool:
        """Whether nodes have run jobs to an end that the state has as waiting or running, or some cannot say it.

        The former is certain: it is a reason for safe mode.
        """
        live = await self._jobs.in_states(frozenset(JobState) - FINAL_STATES)
        ended = ended_since(self._watch, live, await self.newest_attempts({job.id for job in live}))
        if ended:
            text = "job {} has run in attempt {} since the state was saved, and ended"
            await self.enter([text.format(job, attempt) for job, attempt in sorted(ended.items())])
        return bool(ended or self.not_asked())

    async def newest_attempts(self, jobs: Collection[int]) -> dict[int, int]:
        """By job, the newest attempt that ever came to a node. One that cannot say it counts as not asked again."""
        asked = [one.node for one in self._watch.sightings() if one.node in self._examined]
        newest, silent = await newest_attempts(self._watch, asked, jobs)
        for node in silent:
            self._examined.pop(node, None)
        return newest

    @property
    def _is_certain(self) -> bool:
        return self._evidence is not None and self._evidence.is_certain

    async def note_left(self) -> None:
        """The state says so already. What the journal says of jobs that were not changed is forgotten, too."""
        await self._mark_here()  # before an id of the new block is given
        await self._jobs.read_states(frozenset(JobState) - FINAL_STATES, self._note_all)
        await self.settle()
        self._evidence = None
        self._found.clear()
        self._seen.clear()
        self._are_marks_old = True
