"""What comes home of an attempt: the ranks' logs and its outputs as they are written, a training's checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from ugro.agent.artifacts.checkpoint_sync import Checkpoints
from ugro.agent.artifacts.environments import Environments, ExtraEnv
from ugro.agent.artifacts.inline_logs import SmallLogs
from ugro.agent.artifacts.log_mirror import LogMirror
from ugro.agent.artifacts.output_sync import Results, Run
from ugro.agent.support.aio import to_the_end
from ugro.agent.tracking.run_tracker import RunWatch
from ugro.core.errors import NotFound, UgroError
from ugro.core.job import Job, JobState
from ugro.nodes.runs import RunStatus
from ugro.store.jobs import JobStore
from ugro.store.smalllogs import SmallLog
from ugro.workloads.planning import follows_from_spec

log = logging.getLogger(__name__)

_LOGS_S = 30.0
_SILENT_S = 1.0
# A node that is away for longer than this keeps a job's checkpoints.
_FORGETTINGS = 60
_FORGET_AGAIN_S = 1.0
_LONGEST_FORGET_S = 60.0


def checkpoint_env(checkpoints: Checkpoints) -> ExtraEnv:
    """What ranks are told of checkpoints: where to write them, and what to resume from, which is there by then."""

    async def told(job: Job, node: str) -> Mapping[str, str]:
        return (await checkpoints.place(job, node)).env if job.spec.has_checkpoints else {}

    return told


class Homecoming:
    def __init__(
        self,
        jobs: JobStore,
        watch: RunWatch,
        logs: LogMirror,
        checkpoints: Checkpoints,
        results: Results,
        environments: Environments | None = None,
    ) -> None:
        self._jobs = jobs
        self._watch = watch
        self._logs = logs
        self.small_logs = SmallLogs(jobs, logs)
        self.checkpoints = checkpoints
        self.results = results
        self._environments = environments
        self._complete: set[tuple[str, int, int]] = set()  # node, job, attempt: whose logs are here to the last byte

    def follow(self, job: Job) -> None:
        """Begins, or goes on; once for whatever there is."""
        nodes = job.placement.nodes if job.placement else ()
        for node in nodes:
            status = self._watch.status(node, job.id, job.attempt)
            for rank in status.started_ranks if status else ():
                self._logs.follow(node, job.id, job.attempt, rank)
        if job.state is JobState.RUNNING:
            self._follow_results(job, nodes)
            if job.spec.has_checkpoints:
                self.checkpoints.follow(job, nodes)

    def _follow_results(self, job: Job, nodes: Sequence[str]) -> None:
        for node in nodes:
            is_first, has_patterns = node == nodes[0], bool(job.spec.outputs)
            run = Run(job.id, job.attempt, node, is_first, job.spec.results, has_patterns)
            self.results.follow(run, partial(self.describe, job.id))

    async def describe(self, number: int) -> None:
        """Writes down what the job is and runs with; that this cannot be done is no failure of the job's."""
        job = await self._jobs.get(number)
        if self._environments is not None:
            await self._environments.record(job)
        plan = await self._jobs.plan(job)
        try:
            await to_the_end(partial(self.results.describe, job, plan))
        except OSError as error:
            log.warning("what it is cannot be written down: %s", error, extra={"job": number})

    async def bring_results(self, node: str, status: RunStatus) -> None:
        """All outputs of a run that is over, or an error that says why not; none if they were removed for good."""
        if not status.has_outputs:
            return
        run = await self._output_run(node, status)
        if not await self._is_removed(run.job):
            await self.results.bring(run)
        if await self._is_removed(run.job):  # perhaps while they came
            await self.results.drop(run)

    async def _is_removed(self, job: int) -> bool:
        try:
            return (await self._jobs.get(job)).results_removed_at is not None
        except NotFound:
            return False

    async def _output_run(self, node: str, status: RunStatus) -> Run:
        number, attempt = int(status.job), status.attempt
        try:
            job = await self._jobs.get(number)
        except NotFound:
            return Run(number, attempt, node)
        tries = await self._jobs.attempts(number)
        nodes = next((one.placement.nodes for one in tries if one.number == attempt), (node,))
        return Run(number, attempt, node, node == nodes[0], job.spec.results)

    async def bring_logs(self, job: Job) -> None:
        """All logs of an attempt that has ended, as far as its nodes can be asked; the sweep gets the rest later."""
        nodes = job.placement.nodes if job.placement else ()
        told = {node: self._watch.status(node, job.id, job.attempt) for node in nodes}
        await asyncio.gather(
            *(
                self.bring_logs_of({node: status}, _SILENT_S if self._watch.silent_s(node) else _LOGS_S)
                for node, status in told.items()
                if status is not None
            )
        )

    async def bring_logs_of(self, told: Mapping[str, RunStatus], timeout_s: float) -> bool:
        """The logs of one attempt's runs that are over; False when some could not be had in time."""
        missing = {
            (node, int(status.job), status.attempt): status
            for node, status in told.items()
            if (node, int(status.job), status.attempt) not in self._complete
        }
        done = await asyncio.gather(*(self._bring(node, status, timeout_s) for (node, _, _), status in missing.items()))
        home = zip(missing.items(), done, strict=True)
        self._complete |= {key for (key, status), is_home in home if is_home and status.has_ended}
        return all(done)

    async def _bring(self, node: str, status: RunStatus, timeout_s: float) -> bool:
        job, attempt = int(status.job), status.attempt
        ranks = status.known_ranks or await self._planned_ranks(node, status)
        for rank in ranks:
            self._logs.follow(node, job, attempt, rank)
        return await self._logs.finish(job, attempt, ranks, timeout_s)

    async def _planned_ranks(self, node: str, status: RunStatus) -> tuple[int, ...]:
        """Of a run whose supervisor died before it could say which it had started."""
        plan = await self._jobs.planned(int(status.job), status.attempt) if status.is_claimed else None
        if plan is None:  # nothing was started there, or a plain command, which has but one
            return (0,) if status.is_claimed else ()
        return tuple(rank.rank for part in plan.nodes if part.node == node for rank in part.ranks)

    async def show_logs(self, job: int) -> None:
        """What a small command wrote becomes a file; that this cannot be done is no reason to tell nothing else."""
        try:
            await self.small_logs.show(job)
        except UgroError as error:
            log.warning("%s", error, extra={"job": job})

    def has_all(self, job: Job) -> bool:
        """Everything that its attempt made came with its exits: nothing has to be fetched, and nothing described."""
        if not follows_from_spec(job.spec):
            return False
        exits = self._exits(job)
        return bool(exits) and all(one is not None and one.logs is not None and not one.has_outputs for one in exits)

    def sent_logs(self, job: Job) -> SmallLog:
        """Of an attempt of which everything is here."""
        return SmallLog(job.id, job.attempt, tuple(log for one in self._exits(job) for log in (one and one.logs) or ()))

    def note_complete(self, job: Job) -> None:
        """Its logs are recorded: what its nodes keep of them is not needed."""
        self._complete |= {(node, job.id, job.attempt) for node in (job.placement.nodes if job.placement else ())}

    def has_logs_of(self, node: str, status: RunStatus) -> bool:
        return (node, int(status.job), status.attempt) in self._complete

    def _exits(self, job: Job) -> list[RunStatus | None]:
        nodes = job.placement.nodes if job.placement else ()
        return [self._watch.status(node, job.id, job.attempt) for node in nodes]

    async def let_go(self, logs: Iterable[SmallLog]) -> None:
        """All that these commands wrote is known: nobody has to fetch it."""
        await self._logs.let_go((log.job, log.attempt, rank) for log in logs for rank, _ in log.ranks)

    def forget_logs(self, node: str, job: int, attempt: int) -> None:
        """The run is removed there: nobody will ask any more."""
        self._complete.discard((node, job, attempt))
        self.results.forget(Run(job, attempt, node))

    async def bring_checkpoints(self, job: Job) -> None:
        if job.spec.has_checkpoints and job.placement is not None:
            await self.checkpoints.collect(job, job.placement.nodes)

    async def gather(self, job: Job, nodes: Sequence[str]) -> None:
        """Before it is tried again: a node that was away when the last attempt ended may have the newest checkpoint."""
        if job.attempt > 1 and job.spec.has_checkpoints:
            await self.checkpoints.collect(job, nodes)

    async def keep_what_it_made(self, job: Job, nodes: Sequence[str]) -> None:
        """The job is over: its last checkpoint comes home, and then what the nodes keep for it goes."""
        if not job.spec.has_checkpoints:
            return
        if not await self._is_removed(job.id):
            await self.checkpoints.collect(job, nodes)
        if await self._is_removed(job.id):
            await self.checkpoints.drop(job.id)
        pause_s = _FORGET_AGAIN_S
        for _ in range(_FORGETTINGS):
            nodes = await self.checkpoints.forget(job, nodes)
            if not nodes:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_FORGET_S, 2 * pause_s)

    async def close(self) -> None:
        await self._logs.close()
        await self.checkpoints.close()
        await self.results.close()
