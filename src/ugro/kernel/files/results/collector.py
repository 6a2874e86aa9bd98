"""Collects what an attempt produces: logs and outputs as they are written, the checkpoints of trainings.

The rest of the agent uses this class only, and none of its parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import logging
import os
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ugro.features.environments.service.installed import Environments, ExtraEnv
from ugro.kernel.access.model import node_of
from ugro.kernel.files.results.checkpoints import Checkpoint, CheckpointSync, files_of, where_of
from ugro.kernel.files.results.log_mirror import SmallLogs
from ugro.kernel.files.results.output_store import Arrived, OutputStore, shown
from ugro.kernel.files.results.output_sync import OutputSync, Progress, Run
from ugro.kernel.jobs.engine.plan import follows_from_spec
from ugro.kernel.jobs.engine.run_tracker import RunTracker
from ugro.kernel.jobs.engine.runs import RunStatus
from ugro.kernel.jobs.model import Attempt, Cause, Job, JobState
from ugro.kernel.jobs.moves import SmallLog
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.support.aio import to_the_end
from ugro.kernel.support.errors import NotFound, UgroError
from ugro.kernel.telemetry.model import is_metric_file
from ugro.node.files.transfer import is_file

# --- what is put back for the next attempt ----------------------------------------------------------------------------
# What a job made in its working directory is put back when it is tried again: a script finds its snapshot there.
#
# The files are those that were collected of earlier attempts, the newest of each name. What came with the code stays as
# it was sent, metrics stay with their attempt, and what differs between nodes or is only half written is not put back:
# ranks that go on from different places compute something else.


_MOST_NAMED = 3
_ZIP = b"PK\x03\x04"  # what torch.save and numpy.savez write begins with it
_BY_THE_PROGRAM = (Cause.RANK_FAILED, Cause.IMPORT_ERROR)


@dataclass(frozen=True, slots=True)
class Earlier:
    """An attempt before the one that is to start."""

    name: str  # for the user
    folder: Path
    attempt: Attempt
    began_with_files: bool  # of others before it


@dataclass(slots=True)
class Found:
    files: dict[bytes, tuple[Path, str]] = field(default_factory=dict)  # with the name of the attempt that made it
    problems: list[str] = field(default_factory=list)  # why others are not put back

    def words(self) -> tuple[str, ...]:
        """Sentences for the user."""
        by_attempt: dict[str, list[bytes]] = {}
        for name, (_, attempt) in self.files.items():
            by_attempt.setdefault(attempt, []).append(name)
        put = [f"{_named(names)} of {attempt} {_are(names)} put back" for attempt, names in by_attempt.items()]
        return (*put, *self.problems)


def may_be_put_back(job: Job) -> bool:
    """As with checkpoints: a training may always go on, and a plain command only if its spec says so."""
    spec = job.spec
    is_again = job.attempt > 1 or spec.earlier is not None
    is_ours = spec.cwd is None and spec.results.workdir and spec.has_checkpoints and not spec.is_cached
    return is_again and is_ours and spec.retry.puts_back


def find(earlier: Sequence[Earlier], is_code: Callable[[str], bool]) -> Found:
    """``earlier``: the first one first. Blocks."""
    found = Found()
    for one in earlier:
        files, problems = _made_by(one, is_code, found.files if one.began_with_files else {})
        failure = one.attempt.failure
        if one.began_with_files and not files and failure is not None and failure.cause in _BY_THE_PROGRAM:
            problems = [f"{one.name} failed with earlier files and made none, so these are not put back again"]
            found = Found()
        elif not one.began_with_files:
            found = Found()
        found.files |= {name: (path, one.name) for name, path in files.items()}
        found.problems = problems
    return found


def _made_by(
    one: Earlier, is_code: Callable[[str], bool], before: Mapping[bytes, tuple[Path, str]]
) -> tuple[dict[bytes, Path], list[str]]:
    """``before``: what it began with; a node that has such a file still as it was has not made it."""
    files: dict[bytes, Path] = {}
    problems: list[str] = []
    differing: set[bytes] = set()
    for number, node in enumerate(one.attempt.placement.nodes):
        store = OutputStore(one.folder, node, is_first=number == 0)
        failure, arrived = one.attempt.failure, store.arrived()
        if failure is not None and failure.cause is Cause.NODE_LOST and failure.node == node and arrived is None:
            problems.append(f"{node_of(node)} was lost: of what it made, only what had arrived before is put back")
        if arrived is not None and arrived.left_count:
            left = _named([os.fsencode(one.name) for one in arrived.left])
            problems.append(f"what was left on {node_of(node)} is not put back: {left}")
        for name, path in _work_in(store, before):
            known = files.setdefault(name, path)
            if known != path and not filecmp.cmp(known, path, shallow=False):
                differing.add(name)
    halves = {name for name, path in files.items() if _is_half_written(path)} - differing
    ours = {name for name in files if is_code(os.fsdecode(name))} - differing - halves
    for names, why in (
        (differing, "not the same on all nodes"), (halves, "only half written"), (ours, "a part of the code"),
    ):  # fmt: skip
        if names:
            problems.append(f"{_named(names)} of {one.name} {_are(names)} {why}, and not put back")
        for name in names:
            del files[name]
    return files, problems


def _work_in(store: OutputStore, before: Mapping[bytes, tuple[Path, str]]) -> Iterator[tuple[bytes, Path]]:
    for name in store.work():
        path = store.root / os.fsdecode(name)
        if not is_file(os.fsencode(path)) or is_metric_file(shown(name)):
            continue
        if name not in before or not filecmp.cmp(path, before[name][0], shallow=False):
            yield name, path


def _named(names: Collection[bytes]) -> str:
    few = [shown(name) for name in sorted(names)]
    if len(few) <= _MOST_NAMED:
        return ", ".join(few)
    return f"{', '.join(few[: _MOST_NAMED - 1])} and {len(few) - _MOST_NAMED + 1} others"


def _are(names: Collection[bytes]) -> str:
    return "is" if len(names) == 1 else "are"


def _is_half_written(path: Path) -> bool:
    """Of a rank that was killed while it wrote. Other kinds of files do not tell."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP and not zipfile.is_zipfile(path)


# --- the collector ----------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_LOGS_S = 30.0
_SILENT_S = 1.0
_AGAIN_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LONGEST_CHAIN = 50  # of jobs, each submitted again from the one before


def checkpoint_env(checkpoints: CheckpointSync) -> ExtraEnv:
    """The variables that tell ranks where to write checkpoints and what to resume from, which is then on the node."""

    async def variables(job: Job, node: str) -> Mapping[str, str]:
        return (await checkpoints.place(job, node)).env if job.spec.has_checkpoints else {}

    return variables


class Collector:
    def __init__(
        self,
        jobs: JobStore,
        watch: RunTracker,
        logs: SmallLogs,
        checkpoints: CheckpointSync,
        outputs: OutputSync,
        environments: Environments | None = None,
    ) -> None:
        self._jobs = jobs
        self._watch = watch
        self._logs = logs.mirror
        self._small_logs = logs
        self._checkpoints = checkpoints
        self._outputs = outputs
        self._environments = environments
        self._complete: set[tuple[str, int, int]] = set()  # node, job, attempt: all of their logs are here

    def follow(self, job: Job) -> None:
        """Starts to collect what a running job writes; does nothing if that has started."""
        nodes = job.placement.nodes if job.placement else ()
        for node in nodes:
            status = self._watch.status(node, job.id, job.attempt)
            for what in _logs_of(node, status, status.started_ranks) if status else ():
                self._logs.follow(node, (job.id, job.attempt, what), job.attempt_started or job.submitted)
        if job.state is JobState.RUNNING:
            self._follow_outputs(job, nodes)
            if job.spec.has_checkpoints:
                self._checkpoints.follow(job, nodes)

    async def describe(self, number: int) -> None:
        """Writes what the job is and what it runs with into its folder. If that fails, the job does not."""
        job = await self._jobs.get(number)
        if self._environments is not None:
            await self._environments.record(job)
        plan = await self._jobs.plan(job)
        try:
            await to_the_end(partial(self._outputs.describe, job, plan))
        except OSError as error:
            log.warning("the job's description cannot be written: %s", error, extra={"job": number})

    async def close(self) -> None:
        await self._logs.close()
        await self._checkpoints.close()
        await self._outputs.close()

    # --- outputs -----------------------------------------------------------------------------------------------

    async def fetch_outputs(self, node: str, status: RunStatus) -> None:
        """Fetches all outputs of a run that has ended, or raises; nothing if the job's results were removed."""
        if not status.has_outputs:
            return
        run = await self._output_run(node, status)
        if not await self._is_removed(run.job):
            await self._outputs.fetch_all(run)
        if await self._is_removed(run.job):  # perhaps meanwhile
            await self._outputs.drop(run)

    def outputs(self, job: Job, attempt: int, node: str, *, is_first: bool) -> tuple[Arrived | Progress | None, ...]:
        """What is here of a run's files, or how far fetching them is; apart for its checkpoints. Blocks."""
        return tuple(self._outputs.known(run) for run in _parts(job, attempt, node, is_first=is_first))

    def fetching(self, job: Job, attempt: int, node: str) -> tuple[Progress | None, ...]:
        """How far fetching what a run had left is, or why that failed; in the order of ``outputs``."""
        return tuple(self._outputs.fetching(run) for run in _parts(job, attempt, node, is_first=True))

    async def fetch_left(
        self, job: Job, attempt: int, nodes: Sequence[str], is_wanted: Callable[[bytes], bool]
    ) -> None:
        """Starts to fetch what an attempt left on its nodes. Raises if one of them cannot be asked."""
        for node in nodes:
            for run in _parts(job, attempt, node, is_first=node == nodes[0]):
                arrived = await asyncio.to_thread(self._outputs.known, run)
                if isinstance(arrived, Arrived) and arrived.left_count:
                    await self._outputs.fetch_left(run, is_wanted)

    async def drop_kept(self, job: Job, node: str, attempts: Mapping[int, Sequence[str]]) -> None:
        """Deletes the files of all attempts that were left on the node."""
        with contextlib.suppress(NotFound):  # the node was removed from the cluster
            await self._outputs.drop_kept(job.id, node)
        for attempt, nodes in attempts.items():
            for run in _parts(job, attempt, node, is_first=node == nodes[0]) if node in nodes else ():
                await self._outputs.forget_left(run)

    def _follow_outputs(self, job: Job, nodes: Sequence[str]) -> None:
        for node in nodes:
            run = _parts(job, job.attempt, node, is_first=node == nodes[0])[0]
            self._outputs.follow(run, partial(self.describe, job.id))

    async def _output_run(self, node: str, status: RunStatus) -> Run:
        job = await self._jobs.get(int(status.job))
        tried = await self._attempt(status)
        return _parts(job, tried.number, node, is_first=node == tried.placement.nodes[0])[0]

    async def _attempt(self, status: RunStatus) -> Attempt:
        tries = await self._jobs.attempts(int(status.job))
        found = next((one for one in tries if one.number == status.attempt), None)
        if found is None:
            raise NotFound(f"job {status.job} has had no attempt {status.attempt}")
        return found

    async def made_before(self, job: Job, is_code: Callable[[str], bool]) -> Found:
        """The files that attempts before this one made in their working directories, also at jobs before this one."""
        chain = [job]
        with contextlib.suppress(NotFound):
            while (number := chain[-1].spec.earlier) is not None and len(chain) < _LONGEST_CHAIN:
                chain.append(await self._jobs.get(number))
        earlier = []
        for one in reversed(chain):
            for tried in await self._jobs.attempts(one.id):
                if one is job and tried.number >= job.attempt:
                    continue
                plan = await self._jobs.planned(one.id, tried.number)
                began_with = plan is not None and any(part.code is not None for part in plan.nodes)
                name = f"attempt {tried.number}" if one is job else f"job {one.id}"
                earlier.append(Earlier(name, self._outputs.attempt_folder(one.id, tried.number), tried, began_with))
        return await asyncio.to_thread(find, earlier, is_code)

    async def _is_removed(self, job: int) -> bool:
        try:
            return (await self._jobs.get(job)).results_removed_at is not None
        except NotFound:
            return False

    # --- logs --------------------------------------------------------------------------------------------------

    async def fetch_logs(self, job: Job) -> None:
        """Fetches the logs of an attempt that has ended, from nodes that answer; the orphan sweep fetches the rest."""
        nodes = job.placement.nodes if job.placement else ()
        runs = {node: self._watch.status(node, job.id, job.attempt) for node in nodes}
        await asyncio.gather(
            *(
                self.fetch_logs_of({node: status}, _SILENT_S if self._watch.silent_s(node) else _LOGS_S)
                for node, status in runs.items()
                if status is not None
            )
        )

    async def fetch_logs_of(self, runs: Mapping[str, RunStatus], timeout_s: float) -> bool:
        """Fetches the logs of one attempt's runs that have ended; False if some could not be fetched in time."""
        missing = {
            (node, int(status.job), status.attempt): status
            for node, status in runs.items()
            if (node, int(status.job), status.attempt) not in self._complete
        }
        work = (self._fetch_logs(key[0], status, timeout_s) for key, status in missing.items())
        done = await asyncio.gather(*work)
        fetched = zip(missing.items(), done, strict=True)
        self._complete |= {key for (key, status), is_done in fetched if is_done and status.has_ended}
        return all(done)

    async def _fetch_logs(self, node: str, status: RunStatus, timeout_s: float) -> bool:
        job, attempt = int(status.job), status.attempt
        ranks = status.known_ranks or await self._planned_ranks(node, status)
        logs = _logs_of(node, status, ranks)
        if any(not self._logs.is_following((job, attempt, what)) for what in logs):
            placed = (await self._attempt(status)).started
            for what in logs:
                self._logs.follow(node, (job, attempt, what), placed)
        return await self._logs.finish(job, attempt, logs, timeout_s)

    async def _planned_ranks(self, node: str, status: RunStatus) -> tuple[int, ...]:
        """Of a run whose supervisor died before it recorded which ranks it had started."""
        plan = await self._jobs.planned(int(status.job), status.attempt) if status.is_claimed else None
        if plan is None:  # nothing was started there, or a plain command, which has one rank
            return (0,) if status.is_claimed else ()
        return tuple(rank.rank for part in plan.nodes if part.node == node for rank in part.ranks)

    async def show_logs(self, job: int) -> None:
        """Writes the recorded log of a small command to its file. If that fails, the rest is still shown."""
        try:
            await self._small_logs.show(job)
        except UgroError as error:
            log.warning("%s", error, extra={"job": job})

    def has_all(self, job: Job) -> bool:
        """Whether everything that its attempt wrote arrived with the exit records, so that nothing is to be fetched."""
        if not follows_from_spec(job.spec):
            return False
        exits = self._exits(job)
        return bool(exits) and all(
            one is not None and one.logs is not None and not (one.has_outputs or one.is_metered) for one in exits
        )

    def sent_logs(self, job: Job) -> SmallLog:
        """Of an attempt of which everything is here."""
        return SmallLog(job.id, job.attempt, tuple(log for one in self._exits(job) for log in (one and one.logs) or ()))

    async def complete_log(self, job: Job, small: SmallLog) -> None:
        """It is recorded: the copies on its nodes are not needed. A file that was begun is written to its end first."""
        if self._logs.has_begun(small.job, small.attempt, [rank for rank, _ in small.ranks]):
            try:
                await self.write_log(small)
            except UgroError as error:  # the nodes keep it until it is here
                log.warning("%s", error, extra={"job": job.id})
                return
        self._complete |= {(node, job.id, job.attempt) for node in (job.placement.nodes if job.placement else ())}

    def has_logs_of(self, node: str, status: RunStatus) -> bool:
        return (node, int(status.job), status.attempt) in self._complete

    def _exits(self, job: Job) -> list[RunStatus | None]:
        nodes = job.placement.nodes if job.placement else ()
        return [self._watch.status(node, job.id, job.attempt) for node in nodes]

    async def unfollow_logs(self, log: SmallLog) -> None:
        """The log is complete: nothing is fetched for it any more."""
        await self._logs.unfollow((log.job, log.attempt, rank) for rank, _ in log.ranks)

    async def write_log(self, log: SmallLog) -> None:
        await self._small_logs.keep(log, time.time())

    def forget(self, node: str, job: int, attempt: int) -> None:
        """The run was removed from the node: there is nothing left to fetch."""
        self._complete.discard((node, job, attempt))
        self._outputs.forget(Run(job, attempt, node))

    # --- checkpoints -------------------------------------------------------------------------------------------

    async def fetch_checkpoints(self, job: Job) -> None:
        if job.spec.has_checkpoints and job.placement is not None:
            await self._checkpoints.collect(job, job.placement.nodes)

    async def fetch_earlier_checkpoints(self, job: Job, nodes: Sequence[str]) -> None:
        """Before a retry: a node that was away when the last attempt ended may have the newest checkpoint."""
        if job.attempt > 1 and job.spec.has_checkpoints:
            await self._checkpoints.collect(job, nodes)

    async def finish_checkpoints(self, job: Job, nodes: Sequence[str]) -> None:
        """The job has ended: fetches all its checkpoints, then deletes what the nodes keep for it.

        Returns when that is done on every node: one that is away has the only copy.
        """
        if not job.spec.has_checkpoints:
            return
        if not await self._is_removed(job.id):
            await self._checkpoints.collect(job, nodes)
        pause_s = _AGAIN_S
        while nodes:
            done = await asyncio.gather(*(self._finish_checkpoints_on(job, node) for node in nodes))
            nodes = [node for node, is_done in zip(nodes, done, strict=True) if not is_done]
            await asyncio.sleep(pause_s if nodes else 0)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    async def _finish_checkpoints_on(self, job: Job, node: str) -> bool:
        try:
            await self._fetch_all_checkpoints(job, node)
        except NotFound:
            return True  # the node was removed from the cluster
        except UgroError as error:
            log.info("checkpoints stay on the node for now: %s", error, extra={"job": job.id, "node": node})
            return False
        return not await self._checkpoints.drop_on(job, [node])

    async def _fetch_all_checkpoints(self, job: Job, node: str) -> None:
        tries = await self._jobs.attempts(job.id)
        attempt = next((one for one in reversed(tries) if node in one.placement.nodes), None)
        if attempt is not None and job.spec.are_checkpoints_results and not await self._is_removed(job.id):
            is_first = node == attempt.placement.nodes[0]
            run = _parts(job, attempt.number, node, is_first=is_first)[1]
            newest = await self._checkpoints.newest(job.id)
            seeds = await asyncio.to_thread(files_of, newest, run.folder) if newest and newest.node == node else {}
            await self._outputs.fetch_all(run, seeds)
        if await self._is_removed(job.id):
            await self._checkpoints.drop(job.id)

    async def has_progressed(self, job: Job) -> bool:
        """Whether a newer checkpoint is here than the current attempt began from."""
        return await self._checkpoints.has_progressed(job)

    async def has_checkpoint(self, job: int) -> bool:
        return await self._checkpoints.newest(job) is not None

    def checkpoint(self, job: int) -> Checkpoint | None:
        """The newest that is here. Blocks."""
        return self._checkpoints.newest_here(job)


def _logs_of(node: str, status: RunStatus, ranks: Sequence[int]) -> tuple[int | str, ...]:
    """Those of its ranks; the file about what its devices used is followed like a log, by the name of its node."""
    return (*ranks, node) if status.is_metered else tuple(ranks)


def _parts(job: Job, attempt: int, node: str, *, is_first: bool) -> tuple[Run, ...]:
    """An attempt's part on one node: its own files, and the checkpoints, which belong to the job."""
    spec = job.spec
    own = Run(job.id, attempt, node, is_first, spec.results, spec.outputs, spec.checkpoint.name, spec.snapshot)
    return (own, replace(own, where=where_of(job, attempt))) if spec.are_checkpoints_results else (own,)
