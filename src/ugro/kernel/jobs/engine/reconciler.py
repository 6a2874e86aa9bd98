"""The reconcile loop: looks at jobs and nodes, asks the rules, acts, and does so again when something has changed.

It keeps no truth of its own. After a crash it looks at the same database and the same nodes and goes on: a start that
was recorded is asked for again, which the nodes answer with what they already have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ugro.features.power.owners import OwnerRequests
from ugro.features.safe_mode.service import SafeModeControl
from ugro.kernel.access.model import node_of
from ugro.kernel.agent.rules import Jump
from ugro.kernel.files.code.service import Code
from ugro.kernel.files.results.collector import Collector
from ugro.kernel.jobs.engine.finish import Finish, OrphanRuns, RunNotices
from ugro.kernel.jobs.engine.launch import Launch, Planner
from ugro.kernel.jobs.engine.leases import ElasticRuns, Leases
from ugro.kernel.jobs.engine.live_jobs import LiveJobs
from ugro.kernel.jobs.engine.rules import attempt
from ugro.kernel.jobs.engine.rules import attempt as standing
from ugro.kernel.jobs.engine.rules.attempt import AttemptView, NodeRun, Rejoin, RunState, removal
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import RunStatus
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.model import HOLDING_STATES, Cause, Ending, Job, JobState, Placement, Share
from ugro.kernel.jobs.moves import StaleMove
from ugro.kernel.jobs.scheduling import model as decision
from ugro.kernel.jobs.scheduling.fit import Seeker, seekers
from ugro.kernel.jobs.scheduling.scheduler import actions
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.links.logins import Logins
from ugro.kernel.support.aio import KeyedTasks
from ugro.kernel.support.errors import Damaged, NotFound, RemoteFailure, TimedOut, UgroError, Unreachable
from ugro.kernel.support.moments import due_s
from ugro.kernel.support.process import point
from ugro.kernel.support.quantities import names

# --- jobs that waited before the agent started ------------------------------------------------------------------------
# They go on waiting until the nodes have said what they run. If an older copy of the whole state directory was put
# back, only nodes can say that such a job was started since then. Jobs that are submitted later do not wait for that.


_LONGEST_S = 10.0


class FirstAnswers:
    def __init__(self, watch: RunTracker, longest_s: float = _LONGEST_S) -> None:
        self._watch = watch
        self._longest_s = longest_s
        self._held: frozenset[int] | None = None  # None: nobody has looked yet
        self._since = 0.0

    def look(self, waiting: Callable[[], Iterable[Job]]) -> bool:
        """Called again and again. Whether the jobs that waited may start from now on."""
        if self._held is None:
            self._held, self._since = frozenset(job.id for job in waiting()), time.monotonic()
        if not self._held or (self._watch.unheard() and time.monotonic() - self._since < self._longest_s):
            return False
        self._held = frozenset()
        return True

    def waits(self, job: int) -> bool:
        return self._held is None or job in self._held

    def reason(self, job: int) -> str | None:
        """Why it does not start yet, for users."""
        unheard = self._watch.unheard()
        if not self._held or job not in self._held or not unheard:
            return None
        return f"was queued before the agent started: waits until it is known what runs on {names(unheard)}"


# --- the loop ---------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

# Looked at again without a cause: a node may have come to the cluster, a report may have changed.
_LONGEST_PAUSE_S = 1.0
_IDLE_FACTOR = 100  # a scheduling pass without a cause takes at most a hundredth of the time …
_LONGEST_IDLE_PAUSE_S = 10.0  # … but comes at least this often
_STOP_AGAIN_S = 1.0
_DAMAGED_S = 10.0
# With so many jobs that are not over, what happens is gathered for a moment: one look then sees to all of it.
_MANY = 16
_GATHER_S = 0.01
# Many runs are over so soon after their start that it is not worth recording that they run, or following their logs.
_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of jobs: which have not ended, what nodes say of their runs, and whether that may be acted on."""

    live: LiveJobs
    watch: RunTracker
    safe_mode: SafeModeControl
    logins: Logins

    @staticmethod
    def of(jobs: JobStore, live: LiveJobs, watch: RunTracker) -> Knowledge:
        return Knowledge(live, watch, SafeModeControl(jobs, watch), Logins(watch))


class Engine:
    def __init__(
        self,
        jobs: JobStore,
        known: Knowledge,
        planner: Planner,
        code: Code,
        scheduler_input: SchedulerInput,
        collector: Collector,
    ) -> None:
        self._jobs = jobs
        self._watch = watch = known.watch
        self._scheduler_input = scheduler_input
        self._collector = collector
        self.logins = known.logins
        self._leases = Leases(watch)
        self._launch = Launch(jobs, watch, self._leases, planner, code, collector)
        self.notices = RunNotices(jobs, watch)
        self._finish = Finish(jobs, watch, collector, self._launch, self.notices)
        self.safe_mode = known.safe_mode
        watch.prove_by(self.safe_mode.prove)
        self.first_answers = FirstAnswers(watch)
        self._orphans = OrphanRuns(jobs, watch, collector)
        self._wake = asyncio.Event()
        self._work = KeyedTasks(self._wake.set)
        self.elastic = ElasticRuns(jobs, watch)
        self._owner_requests = OwnerRequests(jobs, watch, scheduler_input.owners, self._work)
        self._graces: dict[int, float] = {}  # of jobs that need less of it than their spec gives them
        self._seen_at: dict[tuple[int, int], float] = {}  # attempts under way: when a node first reported a run
        self._must_schedule = True
        self._schedule_at, self._idle_pause_s = 0.0, _LONGEST_PAUSE_S
        self._must_keep = True  # some job is over, and may have made something
        self._silent: frozenset[str] = frozenset()  # nodes, by the last look
        self._people: set[Seeker] | None = None  # in safe mode: everybody who ever submitted a job
        scheduler_input.ask(lambda node: node in self._silent, self.logins.missing)
        watch.on_change(self._wake.set)
        scheduler_input.listen(self.wake)
        # Held from the scheduler's look at the nodes until the starts that follow from it are recorded.
        self.scheduling = asyncio.Lock()
        self.live = known.live
        self.changed = known.live.changed  # some job has moved
        scheduler_input.clock.listen(self._clock_was_set)

    def wake(self) -> None:
        """Something was submitted, has moved, or is to end."""
        self._must_schedule = True
        self._wake.set()

    def shorten_grace(self, job: int, grace_s: float) -> None:
        """For a job that is about to be asked to end. Not recorded: after a crash it has the grace of its spec."""
        self._graces[job] = grace_s

    def _clock_was_set(self, jump: Jump) -> None:
        self.live.clock_was_set()
        self.wake()

    async def run(self) -> None:
        self._scheduler_input.start()
        self._leases.start(lambda: [*self.live.holding(), *self.safe_mode.leased()])
        while True:
            self._wake.clear()
            pause_s = _LONGEST_PAUSE_S
            looked_at = time.monotonic()
            try:
                pause_s = await self._look()
            except Damaged:  # the store has logged it, and stays so: nothing is started or ended from here on
                await asyncio.sleep(_DAMAGED_S)
            except UgroError as error:
                log.error("a pass over the jobs failed: %s", error)
            except Exception:  # the top of a daemon's loop: whatever it is, the other jobs go on
                log.exception("a pass over the jobs failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            if self.live.count > _MANY:
                await asyncio.sleep(max(0.0, looked_at + _GATHER_S - time.monotonic()))

    def speak(self) -> None:
        """Keeps what runs on the nodes alive while the loop stands still; called from another thread."""
        self._leases.speak()

    async def close(self) -> None:
        await self._scheduler_input.close()
        await self._work.close()
        await self._launch.close()
        await self._orphans.close()
        await self._leases.close()
        await self._watch.close()
        await self._collector.close()

    def reports(self, job: Job) -> dict[str, tuple[NodeRun, RunStatus | None]]:
        """What each node of the newest attempt reports now: its state, and its last status."""
        return {
            node: (self._watch.state(node, job.id, job.attempt), self._watch.status(node, job.id, job.attempt))
            for node in _nodes(job)
        }

    async def _look(self) -> float:
        """Returns after how long it has to look again, whatever happens."""
        await self.live.read()
        holding = self.live.holding()
        await self._keep_logins(holding)
        self._watch.keep_up()
        self._scheduler_input.owners.keep_up()
        # Before marks are compared: what is heard later counts in the next look.
        self._must_schedule = self.first_answers.look(self.live.waiting) or self._must_schedule
        silent, self._silent = self._silent, self._watch.silent()
        self._must_schedule = self._must_schedule or not silent <= self._silent
        if self.safe_mode.has_news():
            await self.safe_mode.compare_marks()
            self._work.do(("marks",), self.safe_mode.leave_marks)
        if self.safe_mode.is_on:
            return self._stand_still(holding)
        await self._record(self._owner_requests.look(holding))
        await self._go_on(self.live.holding())
        if self._must_keep:
            await self._keep()
        under_way = {(job.id, job.attempt) for job in holding}
        self._clear_away(under_way)
        self.elastic.forget_all_but(under_way)
        self.notices.forget_all_but(under_way)
        self._seen_at = {key: at for key, at in self._seen_at.items() if key in under_way}
        schedule_s = await self._schedule_when_due()
        is_settling = any(_now() - at < _SETTLE_S for at in self._seen_at.values())
        return min(schedule_s, _SETTLE_S if is_settling else _LONGEST_PAUSE_S)

    async def _keep_logins(self, holding: Collection[Job]) -> None:
        """In safe mode everybody may have a run that the state does not know, and nobody is logged out."""
        if not self.logins.are_possible:
            return
        waiting = seekers(self.live.queue.lines)
        if self.safe_mode.is_on:
            if self._people is None:
                self._people = {Seeker(user) for user in await self._jobs.users()}
            self.logins.keep_up(holding, waiting | self._people)
            return
        self._people = None
        for login in self.logins.keep_up(holding, waiting):
            self._work.do(("log out", login), partial(self.logins.close, login))

    def _stand_still(self, holding: Iterable[Job]) -> float:
        """In safe mode: nothing is started, ended or removed. What known runs write is collected."""
        self._work.cancel_all("start", "stop", "clear", "keep", "part", "rejoin")
        for job in holding:
            self._follow(job, is_settling=False)
        self._work.do(("examine",), self.safe_mode.examine)
        return _LONGEST_PAUSE_S

    async def _go_on(self, holding: Iterable[Job]) -> None:
        # A job that finishes at this moment and was asked to end, too: that is seen when the former is over.
        steps = [self._step(job) for job in holding if ("finish", job.id, job.attempt) not in self._work]
        await self._record(filter(None, steps))

    async def _record(self, moves: Iterable[Awaitable[object]]) -> None:
        """What cannot be of one job is tried again; the others' go on."""
        for result in await asyncio.gather(*moves, return_exceptions=True):
            if isinstance(result, UgroError):
                log.error("cannot be written down now: %s", result)
            elif isinstance(result, BaseException):
                raise result

    # --- jobs that hold devices --------------------------------------------------------------------------------

    def _step(self, job: Job) -> Awaitable[None] | None:
        """Starts slow work in the background; returns the state change to record with the others."""
        start = ("start", job.id, job.attempt)
        is_settling = self._is_settling(job)
        self._follow(job, is_settling)
        if job.state is not JobState.STARTING and start in self._work:
            self._work.cancel(start)  # nothing more is asked of anybody; when it is gone, the job can end
            return None
        view = self._view(job)
        step = attempt.next_step(view)
        if isinstance(step, Rejoin):
            self._work.do(("rejoin", job.id, job.attempt, step.rank), partial(self.elastic.rejoin, job, step))
        return self._do(job, step, is_settling) or self.elastic.news(job, view.elastic) or self.notices.news(job)

    def _do(self, job: Job, step: attempt.Step | None, is_settling: bool) -> Awaitable[None] | None:
        match step:
            case attempt.Move(JobState.STOPPING, _, Ending.DONE) if self._may_finish_at_once(job):
                self._work.do(("finish", job.id, job.attempt), partial(self._finish_at_once, job))
            case attempt.Move(JobState.RUNNING) if is_settling:
                return None
            case attempt.Start(nodes):
                self._work.do(("start", job.id, job.attempt), partial(self._start, job, nodes))
            case attempt.Stop(nodes):
                for node in nodes:
                    self._work.do(("stop", job.id, job.attempt, node), partial(self._stop, job, node))
            case attempt.Move(state, reason, ending):
                return self._move(job, state, reason, ending)
            case attempt.Conclude():
                self._work.do(("conclude", job.id, job.attempt), partial(self._conclude, job))
        return None

    def _may_finish_at_once(self, job: Job) -> bool:
        return self._collector.has_all(job) and not self.notices.of(job)

    def _is_settling(self, job: Job) -> bool:
        """Whether its runs have only just begun."""
        key = (job.id, job.attempt)
        if key not in self._seen_at:
            if all(self._watch.status(node, job.id, job.attempt) is None for node in _nodes(job)):
                return True
            self._seen_at[key] = _now()
        return _now() - self._seen_at[key] < _SETTLE_S

    def _follow(self, job: Job, is_settling: bool) -> None:
        is_concluding = ("conclude", job.id, job.attempt) in self._work
        if not is_settling and not is_concluding and not self._collector.has_all(job):
            self._collector.follow(job)

    def _view(self, job: Job) -> AttemptView:
        refusal = self._launch.refusal(job)
        runs = tuple(self._node_run(job, node) for node in _nodes(job))
        return AttemptView(
            state=job.state,
            ending=job.ending,
            runs=runs,
            is_over_time=self._is_over_time(job),
            refusal=refusal.reason if refusal else None,
            is_overdue=self._launch.is_overdue(job),
            why_ending=self._owner_requests.why(job),
            elastic=self.elastic.view(job, runs),
        )

    def remark(self, job: Job) -> str | None:
        """Which ranks of a training are missing while it goes on, and what else is to be known of it."""
        if job.state not in HOLDING_STATES:
            return None
        view = self._view(job).elastic if job.spec.elastic.min_ranks is not None else None
        missing = standing.described(view) if view is not None else None
        return "; ".join([*([missing] if missing else []), *self.notices.of(job)]) or None

    def _is_over_time(self, job: Job) -> bool:
        limit_s, started = job.spec.time_limit_s, job.attempt_started
        if limit_s is None or started is None:
            return False
        by = self._scheduler_input.clock.reading()
        return by.now.boot_s > due_s(started, limit_s, by)

    def _node_run(self, job: Job, node: str) -> NodeRun:
        run = self._watch.state(node, job.id, job.attempt)
        is_elsewhere = job.placement is not None and self._watch.is_elsewhere(job.placement.on(node))
        if run.is_reachable and not is_elsewhere:
            return run
        is_gone = self._leases.is_over(job, node) or self._is_out_of_sight(job, node, is_elsewhere)
        state = RunState.UNKNOWN if is_elsewhere else run.state
        run = NodeRun(node, state, is_reachable=False, is_gone=is_gone, is_elsewhere=is_elsewhere)
        return replace(run, is_removed=self._is_removed(node))

    def _is_removed(self, node: str) -> bool:
        return self._watch.inventory.find(node_of(node)) is None

    def removed_nodes(self, job: Job) -> str | None:
        """Which nodes of a job that is under way are no longer part of the cluster."""
        removed = [node for node in _nodes(job) if self._is_removed(node)] if job.state in HOLDING_STATES else []
        remedy = "put it back with ugro node add, or cancel the job"
        return f"{removal(removed)}; its ranks may well go on there: {remedy}" if removed else None

    def _is_out_of_sight(self, job: Job, node: str, is_elsewhere: bool) -> bool:
        """Never asked, and nobody is about to; or no longer in the cluster, where nothing is started elsewhere."""
        if ("start", job.id, job.attempt) not in self._work and self._launch.was_never_asked(job, node):
            return True
        return job.ending is Ending.CANCELLED and (is_elsewhere or not self._watch.can_be_asked(node))

    async def _move(self, job: Job, state: JobState, reason: str, ending: Ending | None) -> None:
        with contextlib.suppress(StaleMove):
            await self._jobs.move(job, state, reason, ending=ending or job.ending)
            if state in (JobState.RUNNING, JobState.STOPPING):
                point("running.recorded" if state is JobState.RUNNING else "stop.recorded")
            self._wake.set()

    async def _start(self, job: Job, nodes: tuple[str, ...]) -> None:
        await self._collector.fetch_earlier_checkpoints(job, await self._used(job))
        await self._launch.start(job, nodes)
        refusal = self._launch.refusal(job)
        if refusal is not None and refusal.cause is Cause.GPU_UNAVAILABLE and refusal.node is not None:
            self._scheduler_input.reports.look_again(node_of(refusal.node))

    async def _used(self, job: Job) -> tuple[str, ...]:
        """Every node that it was ever given, this attempt's first."""
        if job.attempt == 1:
            return _nodes(job)
        attempts = await self._jobs.attempts(job.id)
        earlier = [node for attempt in attempts for node in attempt.placement.nodes]
        return tuple(dict.fromkeys((*_nodes(job), *earlier)))

    async def _stop(self, job: Job, node: str) -> None:
        point("stop.asked")
        grace_s = min(job.spec.stop.grace_s, self._graces.get(job.id, job.spec.stop.grace_s))
        try:
            status = await self._watch.runs(node).stop(
                job.id, job.attempt, job.reason or "asked to end", grace_s
            )
        except (Unreachable, TimedOut, RemoteFailure, NotFound) as error:
            log.warning("cannot stop it yet: %s", error, extra={"job": job.id, "node": node})
            await asyncio.sleep(_STOP_AGAIN_S)
        else:
            point("stop.answered")
            if self.live.is_under_way(job):  # else it is over by now, and gone from the node
                self._watch.learn(node, status)

    async def _finish_at_once(self, job: Job) -> None:
        with contextlib.suppress(StaleMove):
            await self._finish.at_once(job)
        self.wake()

    async def _conclude(self, job: Job) -> None:
        with contextlib.suppress(StaleMove):
            await self._finish.conclude(job)
        self._graces.pop(job.id, None)
        self._must_keep = self._must_keep or job.spec.has_checkpoints
        self.wake()
        # Apart: it may have to ask the nodes, and nobody's start is to wait for that.
        self._work.do(("describe", job.id), partial(self._collector.describe, job.id))

    async def _keep(self) -> None:
        """Also what an agent before us did not come to."""
        self._must_keep = False
        jobs = await self._jobs.to_keep()
        for job in jobs:
            self._work.do(("keep", job.id), partial(self._finish_checkpoints, job))
        # Those that are at it may wait for a node for days. Those that rest after a failure are asked for again.
        self._must_keep = self._must_keep or any(("keep", job.id) not in self._work for job in jobs)

    async def _finish_checkpoints(self, job: Job) -> None:
        try:
            await self._collector.finish_checkpoints(job, await self._used(job))
            await self._jobs.kept(job)
        finally:
            self._must_keep = True

    def _clear_away(self, under_way: set[tuple[int, int]]) -> None:
        for node, status in self._watch.others(under_way):
            key = ("clear", node, status.job, status.attempt)
            self._work.do(key, partial(self._orphans.clear, node, status))

    # --- jobs that wait ----------------------------------------------------------------------------------------

    async def _schedule_when_due(self) -> float:
        """Returns when it is due again. Passes take at most half of the time, and those without a cause far less."""
        begun = time.monotonic()
        wait_s = self._schedule_at - begun
        if wait_s > (0.0 if self._must_schedule else -self._idle_pause_s):
            return wait_s if self._must_schedule else _LONGEST_PAUSE_S
        self._must_schedule = False
        async with self.scheduling:
            await self._schedule()
        spent_s = time.monotonic() - begun
        self._schedule_at = begun + 2 * spent_s
        self._idle_pause_s = min(_LONGEST_IDLE_PAUSE_S, max(_LONGEST_PAUSE_S, _IDLE_FACTOR * spent_s))
        return _LONGEST_PAUSE_S

    async def _schedule(self) -> None:
        await self._drop(self.live.cancelled())
        if not self.live.queue:
            return
        wanted = [
            one
            for one in actions(await self._scheduler_input.take(self.live), self.live.queue)
            if not self.first_answers.waits(one.for_job if isinstance(one, decision.Preempt) else one.job)
        ]
        by_id = {one.job: job for one in wanted if (job := self.live.get(one.job)) is not None}
        await self._record([self._act(one, by_id) for one in wanted if not isinstance(one, decision.Start)])
        await self._give([one for one in wanted if isinstance(one, decision.Start)], by_id)

    async def _drop(self, cancelled: Iterable[Job]) -> None:
        await self._record(self._drop_one(job) for job in cancelled)

    async def _drop_one(self, job: Job) -> None:
        reason = "cancelled between two attempts" if job.attempt else "cancelled before it started"
        with contextlib.suppress(StaleMove):
            await self._jobs.move(job, JobState.CANCELLED, reason, exit_code=130)
            self._must_keep = True

    async def _give(self, wanted: Sequence[decision.Start], waiting: dict[int, Job]) -> None:
        """Their devices, to all that can start now, in one commit."""
        jobs = [waiting[one.job] for one in wanted]
        given = [(job, self._located(one.placement, job), one.reason) for job, one in zip(jobs, wanted, strict=True)]
        outcomes = await self._jobs.start_many([(job, where, why) for job, where, why in given if where is not None])
        point("start.recorded")
        started = [outcome for outcome in outcomes if isinstance(outcome, Job)]
        for job in started:
            self._launch.decided(job)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, StaleMove):
                log.error("cannot be started now: %s", outcome)
        await self._go_on(started)

    async def _act(self, wanted: decision.Decision, waiting: dict[int, Job]) -> None:
        with contextlib.suppress(StaleMove):
            match wanted:
                case decision.Preempt(job):
                    await self._jobs.ask_to_end(job, Ending.PREEMPTED)
                    self._wake.set()
                case decision.Fail(job, reason):
                    await self._jobs.move(waiting[job], JobState.FAILED, reason, exit_code=1)
                    self.wake()

    def _located(self, placement: Placement, job: Job) -> Placement | None:
        """Which login, machine, boot and folder each is; None when one cannot tell: it could not be asked to start."""
        shares: list[Share] = []
        for share, name in zip(placement.shares, self.logins.located(placement, job.user), strict=True):
            moment, machine = self._watch.moment(name), self._watch.machine(name)
            if moment is None or machine is None:
                return None
            found = replace(share, node=name, boot_id=moment[0].boot_id, hostname=machine.hostname, root=machine.root)
            shares.append(found)
        located = Placement(tuple(shares))
        self.logins.placed(located)
        return located


def _now() -> float:
    return asyncio.get_running_loop().time()


def _nodes(job: Job) -> tuple[str, ...]:
    return job.placement.nodes if job.placement else ()
