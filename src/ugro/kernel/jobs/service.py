"""Requests about jobs: submit, show, cancel, follow. The engine does the rest."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ugro.features.environments.model import EnvRequest
from ugro.features.quotas.service import QuotaGate
from ugro.features.safe_mode.model import REMEDY
from ugro.kernel.access.caller import caller as asking
from ugro.kernel.access.caller import sees, shown, viewer
from ugro.kernel.access.model import Caller
from ugro.kernel.agent.model import Event
from ugro.kernel.files.results.log_mirror import SmallLogs
from ugro.kernel.files.results.log_stream import LogStream, Selection, agent_stops, log_text, selection
from ugro.kernel.jobs.config.file import job_file
from ugro.kernel.jobs.config.options import in_keys
from ugro.kernel.jobs.dry_run import DryRunner, Previewer, Reasons
from ugro.kernel.jobs.engine.reconciler import Engine
from ugro.kernel.jobs.engine.scheduler_input import SchedulerInput
from ugro.kernel.jobs.model import (
    HOLDING_STATES,
    WAITING_STATES,
    After,
    Ending,
    Job,
    JobSpec,
    JobState,
    Placement,
)
from ugro.kernel.jobs.moves import About
from ugro.kernel.jobs.operations import (
    CancelJob,
    Details,
    ExplainJob,
    FolderRead,
    FolderReading,
    GetJob,
    GetJobFile,
    JobFile,
    JobList,
    ListEvents,
    ListJobs,
    PlanJob,
    Planned,
    ReadFolders,
    ReadJobLog,
    RetryJob,
    StreamJobLogs,
    SubmitJob,
    SubmitJobs,
    Submitted,
    SubmittedMany,
    WaitForJob,
    Withdrawn,
    WithdrawSubmission,
)
from ugro.kernel.jobs.records import DryRun, Why
from ugro.kernel.jobs.rows import Listed
from ugro.kernel.jobs.scheduling.why import why
from ugro.kernel.jobs.submission import Needs, SubmissionReader, Submit, Taken, VisibleJobs
from ugro.kernel.operations import request as operations
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import ChangeSignal
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, UsageError
from ugro.kernel.support.process import point
from ugro.kernel.support.quantities import is_number, without_numbers

_LOOK_S = 0.5  # without a signal
_NAMED_JOBS = 1000
_AT_ONCE_S = 0.02  # a batch is read for so long before others are answered


@dataclass(frozen=True, slots=True)
class Change:
    """An edited job file, and fields of a form that override it."""

    text: str
    fields: Mapping[str, str]


class JobService:
    def __init__(
        self,
        store: Store,
        engine: Engine,
        scheduler_input: SchedulerInput,
        small: SmallLogs,
        launching: Previewer,
        submitting: SubmissionReader,
    ) -> None:
        self._jobs = jobs = store.jobs
        self._listing = store.listing
        self._visibility = store.visibility
        self._visible = VisibleJobs(store)
        self._small = small
        self._engine = engine
        self._scheduler_input = scheduler_input
        self._submitting = submitting
        self._previews = DryRunner(jobs, engine.live, scheduler_input, launching)
        self._reasons = Reasons(engine, scheduler_input)
        self._gate = QuotaGate(jobs, engine.live, scheduler_input)
        self._logs = LogStream(jobs, small, engine.changed, self._look)

    def end_streams(self) -> None:
        """Ends all streams, because the agent stops."""
        self._logs.is_ending = True
        self._engine.changed.notify()

    # --- in and out --------------------------------------------------------------------------------------------

    @answers(SubmitJob)
    async def submit_job(self, asked: SubmitJob, caller: Caller) -> Submitted | operations.Needs:
        found = await self.submit(asked)
        return operations.Needs(found.variables) if isinstance(found, Needs) else Submitted(found)

    async def submit(self, submit: Submit) -> Job | Needs:
        point("submit.begun")
        if isinstance(spec := await self._asked(submit), Needs):
            return spec
        return (await self._put([(await self._submitting.upgraded(spec, submit.user), submit)]))[0]

    async def _asked(self, submit: Submit, taken: Taken | None = None) -> JobSpec | Needs:
        """The job, after all that can be checked before it is queued: for a submission and for a dry run."""
        self._engine.safe_mode.check("and takes no jobs")
        with _in_terms_of(submit):
            spec = await self._submitting.spec(submit, taken)
            if not isinstance(spec, Needs):
                await self._check([(spec, submit.user)])
        return spec

    async def environment(self, submit: Submit) -> EnvRequest | Needs | None:
        """The Python environment that such a job would have."""
        return await self._submitting.environment(submit)

    @answers(SubmitJobs)
    async def submit_jobs(self, asked: SubmitJobs, caller: Caller) -> SubmittedMany:
        """Submits all of them in one commit, or none."""
        submits = asked.jobs
        self._engine.safe_mode.check("and takes no jobs")
        taken: Taken = {}
        read: list[JobSpec | Needs] = []
        began_s = 0.0
        with _in_terms_of(*submits):
            for submit in submits:
                if time.monotonic() - began_s > _AT_ONCE_S:  # ten thousand, or a few hundred large ones, take seconds
                    await asyncio.sleep(0)
                    began_s = time.monotonic()
                read.append(await self._submitting.spec(replace(submit, env=submit.env or {}), taken))
            pairs = [(spec, one.user) for spec, one in zip(read, submits, strict=True) if not isinstance(spec, Needs)]
            specs = [await self._submitting.upgraded(spec, user) for spec, user in pairs]
            await self._check([(spec, submit.user) for spec, submit in zip(specs, submits, strict=True)])
        return SubmittedMany(tuple(await self._put(list(zip(specs, submits, strict=True)))))

    @answers(PlanJob)
    async def plan_job(self, asked: PlanJob, caller: Caller) -> Planned | operations.Needs:
        taken: Taken = {}
        if isinstance(spec := await self._asked(asked, taken), Needs):
            return operations.Needs(spec.variables)
        async with self._gate.room([(asked.user, asked.key)]):
            pass  # it only looks
        found = await self._dry_run(spec, asked.user)
        predicted = await self._submitting.predict(spec, found.placement)
        memory = await self._submitting.memory(spec, found.placement)
        snapshot = next(iter(taken.values()), None)
        return Planned(replace(found, snapshot=snapshot, prediction=predicted, memory=memory))

    async def read(self, submit: Submit) -> JobSpec | Needs:
        """The spec of a job that is not submitted itself."""
        spec = await self._submitting.spec(submit)
        return spec if isinstance(spec, Needs) else await self._submitting.upgraded(spec, submit.user)

    @answers(ReadFolders)
    async def read_folders(
        self, asked: ReadFolders, caller: Caller
    ) -> AsyncGenerator[list[FolderReading | FolderRead]]:
        """Reads the folders of a job that is about to be submitted, and says how far it is."""
        return self._submitting.read_folders(asked)

    async def uses(self, spec: JobSpec, module: str) -> bool:
        """Whether its script imports it; True if no code is sent, or nobody can tell."""
        return await self._submitting.uses(spec, module)

    async def with_script(self, spec: JobSpec) -> JobSpec:
        """A spec that now runs another script of its code: with what that imports."""
        return await self._submitting.with_script(spec)

    async def place_idle(self, spec: JobSpec) -> Placement:
        """The nodes that it would get if the cluster were idle."""
        await self._submitting.check_fit([spec])
        return await self._previews.place_idle(spec)

    async def expect_allowed(self, spec: JobSpec, user: str, *, may_end: bool = True) -> None:
        """Raises NotAllowed for what is not submitted itself, and whose jobs a quota would never let start."""
        await self._gate.check([(spec, user)], may_end=may_end)

    async def expect_all_allowed(self, specs: Sequence[JobSpec], user: str, whose: str) -> None:
        """The same for jobs that have to run at once."""
        await self._gate.check_together(specs, user, whose)

    async def preview(self, spec: JobSpec, user: str) -> DryRun:
        """Where it would start now. Raises Unsatisfiable or NotAllowed if it never could."""
        await self._check([(spec, user)])
        return await self._dry_run(spec, user)

    async def _dry_run(self, spec: JobSpec, user: str) -> DryRun:
        found = await self._previews.dry_run(spec, user)
        return replace(found, reason=self._for_caller(found.reason))

    @property
    def changed(self) -> ChangeSignal:
        """Some job has moved."""
        return self._engine.changed

    async def submit_made(
        self, spec: JobSpec, user: str, key: str, *, is_exempt: bool = False, is_asked: bool = False
    ) -> Job:
        """Submits a job that the agent itself has made.

        ``is_exempt``: it computes nothing, and has no quota. ``is_asked``: a person wants it now, as any other.
        """
        self._engine.safe_mode.check("and takes no jobs")
        self._submitting.expect_stored(spec)
        await (self._submitting.check_fit([spec]) if is_exempt else self._check([(spec, user)]))
        # What the agent makes waits in its own queue until there is something for it to do.
        return (await self._put([(spec, Submit(user, key))], is_limited=is_asked))[0]

    async def _check(self, wanted: Sequence[tuple[JobSpec, str]]) -> None:
        """Raises Unsatisfiable for what no node could ever run, and NotAllowed for what a quota never allows."""
        await self._submitting.check_fit([spec for spec, _ in wanted])
        await self._gate.check(wanted)

    @answers(RetryJob)
    async def retry_job(self, asked: RetryJob, caller: Caller) -> Job:
        return await self.retry(asked.word, asked.user, asked.key, exact=asked.exact, puts_back=asked.put_back)

    async def retry(
        self, word: str, user: str, key: str, *, exact: bool = False, puts_back: bool | None = None
    ) -> Job:
        """Submits an ended job again, as a new job with the same spec. ``exact``: only if its code is still here."""
        if (known := await self._jobs.submitted(key)) is not None:
            return known  # a repeated request; ``word`` may mean this new job by now
        self._engine.safe_mode.check("and takes no jobs")
        old = await self.find(word)
        user = owner_of_copy(old.user, user)
        if not old.is_final:
            raise NotAllowed(f"job {old.id} is {old.state}: only an ended job can be run again", hint=_end_first(old))
        if exact:
            self._submitting.expect_code(old)
        await self._check([(old.spec, user)])
        spec = replace(_again(old, user, puts_back), after=await self._still_known(old.spec.after))
        async with self._gate.room([(user, key)]):
            submission = await self._jobs.submit(spec, user, key, About(origin=old.origin))
        point("submit.recorded")
        if submission.is_new:
            await self._jobs.note("retried", f"submitted again as job {submission.job.id} by {user}", job=old)
            await self._jobs.note("retried", f"the same as job {old.id}, which {old.state}", job=submission.job)
            self._engine.wake()
            await self._submitting.note_predictions([submission.job])
            if exact:
                await self._jobs.note("retried", await self._submitting.compared(old, user), job=submission.job)
        return submission.job

    @answers(WithdrawSubmission)
    async def withdraw_submission(self, asked: WithdrawSubmission, caller: Caller) -> Withdrawn:
        return Withdrawn(await self.withdraw(asked.key))

    async def withdraw(self, key: str) -> Job | None:
        """Of a client that was interrupted: its job if that is recorded already, else it is not submitted any more."""
        return await self._jobs.withdraw(key)

    async def editable(self, number: int) -> Job:
        """To launch it again with changes, without jobs to wait for that are gone. NotAllowed if its code is gone."""
        job = await self._jobs.get(number)
        _expect_own_values(job)
        self._submitting.expect_same_code(job)
        return replace(job, spec=replace(job.spec, after=await self._still_known(job.spec.after)))

    async def launch_again(self, number: int, change: Change, user: str, key: str) -> Job:
        """Submits a job with the code of an earlier one, from its edited job file; one job for each ``key``."""
        if (known := await self._jobs.submitted(key)) is not None:
            return known
        self._engine.safe_mode.check("and takes no jobs")
        old = await self._jobs.get(number)
        _expect_own_values(old)
        spec = await self._submitting.derived(old, change.text, change.fields)
        await self._check([(spec, user)])
        about = await self._submitting.about(spec, Submit(user, key, origin=old.origin))
        try:
            async with self._gate.room([(user, key)]):
                submission = await self._jobs.submit(spec, user, key, about)
            point("submit.recorded")
        finally:
            self._engine.wake()  # also if the browser left
        if submission.is_new:
            new = submission.job
            await self._jobs.note("launched", f"launched again with changes as job {new.id} by {user}", job=old)
            await self._jobs.note("launched", f"from job {old.id}, with changes", job=new)
            await self._submitting.note_predictions([new])
        return submission.job

    async def _still_known(self, after: After) -> After:
        """Without the jobs that retention has removed since: they had ended."""
        known = await self._jobs.states_of((*after.ok, *after.any))
        return After(*(tuple(number for number in some if number in known) for some in (after.ok, after.any)))

    @answers(CancelJob)
    async def cancel_job(self, asked: CancelJob, caller: Caller) -> Job:
        return await self.cancel(asked.word)

    async def cancel(self, word: str, *, grace_s: float | None = None) -> Job:
        """``grace_s``: less than what its spec gives it, as nobody needs what it would save."""
        self._engine.safe_mode.check("and ends no jobs")
        found = await self.find(word)
        if grace_s is not None and found.state in HOLDING_STATES:
            self._engine.shorten_grace(found.id, grace_s)
        job = await self._jobs.ask_to_end(found.id, Ending.CANCELLED)
        point("cancel.recorded")
        self._engine.wake()
        return job

    def expect_submittable(self) -> None:
        """Raises in safe mode."""
        self._engine.safe_mode.check("and takes no jobs")

    def expect_removable(self) -> None:
        """Raises in safe mode."""
        self._engine.safe_mode.check("and removes nothing")

    async def _put(self, submits: Sequence[tuple[JobSpec, Submit]], *, is_limited: bool = True) -> list[Job]:
        point("submit.asked")
        self._engine.safe_mode.check("and takes no jobs")  # it may have begun meanwhile
        known = [await self._submitting.about(spec, submit) for spec, submit in submits]
        counted = [(submit.user, submit.key) for _, submit in submits] if is_limited else []
        try:
            async with self._gate.room(counted):
                submissions = await self._jobs.submit_many(
                    (spec, submit.user, submit.key, about) for (spec, submit), about in zip(submits, known, strict=True)
                )
            point("submit.recorded")
        finally:
            self._engine.wake()  # a job may be recorded also when this is cancelled because its client left
        await self._submitting.note_predictions([one.job for one in submissions if one.is_new])
        return [submission.job for submission in submissions]

    # --- looking -----------------------------------------------------------------------------------------------

    @answers(ListJobs)
    async def list_jobs(self, asked: ListJobs, caller: Caller) -> JobList:
        return JobList(tuple(await self.page(Listed(asked.state, before=asked.before, limit=asked.limit))))

    async def page(self, wanted: Listed) -> list[Job]:
        """The newest first."""
        return await self.with_reasons(await self._listing.page(replace(wanted, viewer=viewer())))

    async def with_reasons(self, jobs: Sequence[Job]) -> list[Job]:
        """The same jobs; those that wait or are made ready have that as their reason."""
        found = [self._prepared(job) for job in await self._reasons.added_to(jobs)]
        return found if viewer() is None else [replace(job, reason=self._for_caller(job.reason)) for job in found]

    def _for_caller(self, text: str) -> str:
        """Without the numbers of private jobs of others that wait or hold something now."""
        return text if viewer() is None else without_numbers(text, self._is_hidden)

    def _is_hidden(self, number: int) -> bool:
        job = self._engine.live.get(number)
        return job is not None and not sees(job)

    async def find(self, word: str) -> Job:
        """Of the jobs that the caller may see."""
        try:
            return await self._visible.find(word)
        except NotFound as error:
            if is_number(word) or word == "last":
                raise
            listed = Listed(limit=_NAMED_JOBS, viewer=viewer())
            names = dict.fromkeys(job.spec.name for job in await self._listing.page(listed))
            near = difflib.get_close_matches(word, names, n=1)
            raise NotFound(error.message, hint=f"did you mean {near[0]}?" if near else error.hint) from error

    async def known(self, numbers: Sequence[int]) -> Collection[int]:
        """Those of the jobs that exist and that the caller may see; in one query, because there may be a thousand."""
        found = await self._jobs.states_of(numbers)
        return found.keys() - await self._visibility.hidden_from(viewer())

    async def find_different(self, words: Sequence[str]) -> list[Job]:
        """A job for each word, to be compared: a name means the newest job of that name that no other word means."""
        exact = {word: await self.find(word) for word in words if is_number(word) or word == "last"}
        taken = {job.id for job in exact.values()}
        found: list[Job] = []
        for word in words:
            job = exact.get(word) or await self._newest_other(word, taken)
            if any(job.id == one.id for one in found):
                same = [one for one in words if one in exact and exact[one].id == job.id]
                raise _same(job, f"{' and '.join(same)} are the same job")
            found.append(job)
            taken.add(job.id)
        return found

    async def _newest_other(self, name: str, taken: Collection[int]) -> Job:
        try:
            return await self._visible.find(name, taken)
        except NotFound:
            job = await self.find(name)
        raise _same(job, f"it is the only job named {name}")

    @answers(GetJob)
    async def get_job(self, asked: GetJob, caller: Caller) -> Details:
        return await self.details(asked.word)

    async def details(self, word: str) -> Details:
        [job] = await self.with_reasons([await self.find(word)])
        return Details(job, tuple(await self._jobs.attempts(job.id)))

    @answers(GetJobFile)
    async def get_file(self, asked: GetJobFile, caller: Caller) -> JobFile:
        return JobFile(job_file(shown(await self.find(asked.word)).spec))

    @answers(ExplainJob)
    async def explain_job(self, asked: ExplainJob, caller: Caller) -> Why:
        return await self.why(asked.word)

    async def why(self, word: str) -> Why:
        job, live = await self.find(word), self._engine.live
        if (safe_mode := self._engine.safe_mode.status()) is not None and job.state in WAITING_STATES:
            return Why(job.id, f"the agent is in safe mode: {safe_mode.brief}", (REMEDY,))
        if (reason := self._engine.first_answers.reason(job.id)) is not None:
            return Why(job.id, reason)
        if (remark := self._engine.removed_nodes(job) or self._engine.remark(job)) is not None:
            return Why(job.id, remark, nodes=job.placement.node_names if job.placement else ())
        await live.read()
        view = await self._scheduler_input.take(live)
        if job.ending is Ending.CANCELLED and job.state in WAITING_STATES:
            return Why(job.id, "it is being cancelled")
        if live.get(job.id) is None:
            job = await self._jobs.get(job.id)  # it may have ended meanwhile
        found = why(replace(view, ended={job.id: job.state}), job.id, live.queue, self._is_hidden)
        offset_s = self._scheduler_input.clock.reading().now.offset_s
        if found.quota_until is not None:
            found = replace(found, quota_until=found.quota_until + offset_s)
        if found.may_start_at is None:
            return found
        return replace(found, may_start_at=found.may_start_at + offset_s)

    async def import_note(self, number: int) -> str | None:
        """Who has what the job's script imports, if some nodes lack it."""
        spec = (await self.find(str(number))).spec
        return await self._scheduler_input.import_note(spec) if spec.node_imports.names else None

    async def _look(self, number: int) -> Job:
        return (await self.with_reasons([await self._jobs.get(number)]))[0]

    def _prepared(self, job: Job) -> Job:
        if job.state is JobState.STARTING and (text := self._submitting.progress(job)):
            return replace(job, reason=text)
        remark = self._engine.remark(job) if job.state is JobState.RUNNING else None
        said = self._engine.removed_nodes(job) or remark
        return job if said is None else replace(job, reason=said)

    # --- following ---------------------------------------------------------------------------------------------

    @answers(WaitForJob)
    async def wait_for_job(self, asked: WaitForJob, caller: Caller) -> AsyncGenerator[list[Job]]:
        return self.moves((await self.find(asked.word)).id, asked.timeout_s)

    async def moves(self, number: int, timeout_s: float | None = None) -> AsyncGenerator[list[Job]]:
        """The job now and after each change, until it has ended or the timeout is over."""
        shown: tuple[JobState, int, str] | None = None
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while not self._logs.is_ending:
            seen, known = self._engine.changed.count, self._engine.live.get(number)
            job = await self._look(number)
            if (job.state, job.attempt, job.reason) != shown:
                shown = (job.state, job.attempt, job.reason)
                yield [job]
            now = time.monotonic()
            if job.is_final or now >= deadline:
                return
            await self._until_it_moves(number, known, seen, min(deadline, now + _LOOK_S))
        raise agent_stops()

    async def _until_it_moves(self, number: int, known: Job | None, seen: int, until: float) -> None:
        """Waits for a change of this job; other jobs change all the time."""
        while (left_s := until - time.monotonic()) > 0 and not self._logs.is_ending:
            await self._engine.changed.wait(seen, left_s)
            seen = self._engine.changed.count
            if known is None or self._engine.live.get(number) is not known:
                return

    @answers(ListEvents)
    async def list_events(self, asked: ListEvents, caller: Caller) -> AsyncGenerator[list[Event]]:
        return self._events(asked, (await self.find(asked.job)).id if asked.job else None)

    async def _events(self, asked: ListEvents, job: int | None) -> AsyncGenerator[list[Event]]:
        after = asked.after
        if asked.since is not None:
            since = datetime.fromtimestamp(asked.since, UTC).isoformat(timespec="milliseconds")
            after = max(after, await self._seq_before(since))
        while not self._logs.is_ending:
            seen = self._engine.changed.count
            found = await self._jobs.events(after=after, job=job)
            if found:
                after = found[-1].seq
                hidden = await self._visibility.hidden_from(viewer())
                yield [event for event in found if event.job not in hidden]
            elif not asked.follow:
                return
            else:
                await self._engine.changed.wait(seen, _LOOK_S)
        raise agent_stops()

    async def make_readable(self, number: int) -> None:
        """To be called before the files of a job's logs are opened."""
        await self._small.show(number)

    @answers(ReadJobLog)
    async def read_log(self, asked: ReadJobLog, caller: Caller) -> AsyncGenerator[bytes]:
        return log_text(await self._checked_logs(asked.word, selection(asked)))

    @answers(StreamJobLogs)
    async def stream_logs(self, asked: StreamJobLogs, caller: Caller) -> AsyncGenerator[bytes]:
        return await self._checked_logs(asked.word, selection(asked))

    async def _checked_logs(self, word: str, wanted: Selection) -> AsyncGenerator[bytes]:
        job = await self.find(word)
        if not wanted.follow:
            await self._logs.check(job, wanted)
        return self.logs(job.id, wanted)

    def logs(self, number: int, wanted: Selection) -> AsyncGenerator[bytes]:
        return self._logs.frames(number, wanted)

    async def _seq_before(self, since: str) -> int:
        """The last event before a time. Events are in order of time, so a binary search finds it."""
        low, high = 0, 1
        while (found := await self._jobs.events(after=high, limit=1)) and found[0].at < since:
            low, high = high, 2 * high
        while low < high:
            middle = (low + high) // 2
            found = await self._jobs.events(after=middle, limit=1)
            if found and found[0].at < since:
                low = middle + 1
            else:
                high = middle
        return low


@contextlib.contextmanager
def _in_terms_of(*submits: Submit) -> Iterator[None]:
    """What to try names keys, and no options, where jobs were given by keys."""
    try:
        yield
    except UgroError as error:
        if error.hint is not None and not all(one.as_options for one in submits):
            error.hint = in_keys(error.hint)
        raise


def _again(old: Job, user: str, puts_back: bool | None) -> JobSpec:
    """One that did not succeed goes on with the files that it made, unless its spec or ``puts_back`` says no."""
    retry = old.spec.retry if puts_back is None else replace(old.spec.retry, puts_back=puts_back)
    goes_on = old.state is not JobState.SUCCEEDED and retry.puts_back and user == old.user
    return replace(old.spec, retry=retry, earlier=old.id if goes_on else None)


def owner_of_copy(owner: str, user: str) -> str:
    """Whose a job is that has another's variables: an operator who runs it again runs it for its user."""
    asks = asking()
    return user if asks is None or asks.knows_values_of(owner) else owner


def _expect_own_values(old: Job) -> None:
    """With other settings it could print them."""
    asks = asking()
    if asks is not None and not asks.knows_values_of(old.user) and (old.spec.env or old.spec.environment):
        raise NotAllowed(
            f"job {old.id} has variables of {old.user}, which are not yours to use",
            hint=f"make your own from its file: ugro clone {old.id} > job.yaml",
        )


def _end_first(job: Job) -> str:
    return f"cancel it first: ugro cancel {job.id}"


def _same(job: Job, why: str) -> UsageError:
    return UsageError(f"cannot compare job {job.id} with itself: {why}", hint="choose two jobs: ugro status --all")
