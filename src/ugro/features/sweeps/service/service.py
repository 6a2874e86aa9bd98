"""Requests about sweeps, and the loop that drives those which are not over."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ugro.features.sweeps import operations
from ugro.features.sweeps.model import (
    Budget,
    Importance,
    PlannedTrial,
    Searched,
    Sweep,
    SweepPlan,
    SweepReport,
    SweepState,
    Trial,
    TrialState,
)
from ugro.features.sweeps.rules.decision import View, best_trial, eta_s, total
from ugro.features.sweeps.rules.reading import read, without_values
from ugro.features.sweeps.rules.spec import SweepSpec, grid_size, scales, words_of
from ugro.features.sweeps.service.creation import SweepRequest, prepare, trial_job, trial_spec
from ugro.features.sweeps.service.runner import Measuring, Runner, problem_of
from ugro.features.sweeps.service.sampler import Chooser, UsedUp, importances
from ugro.features.sweeps.service.studies import (
    METHOD,
    Studies,
    StudyHost,
    StudyRunner,
    study_importances,
    study_report,
)
from ugro.features.sweeps.store import NewSweep, SweepStore
from ugro.kernel.access.caller import viewer
from ugro.kernel.access.model import Caller
from ugro.kernel.files.results.log_stream import agent_stops
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.jobs.service import JobService, owner_of_copy
from ugro.kernel.jobs.store import JobStore
from ugro.kernel.jobs.submission import Needs
from ugro.kernel.operations.request import answers
from ugro.kernel.store.database import Store
from ugro.kernel.support.aio import ChangeSignal, wait_for_any
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import NotAllowed, UgroError, UsageError
from ugro.kernel.support.process import point

# --- preview ----------------------------------------------------------------------------------------------------------
# ``--dry-run``: the trials that a sweep would make first. It records and starts nothing.


_SHOWN = 5


async def preview(new: NewSweep, number: int, jobs: JobService) -> SweepPlan:
    """``number``: that the sweep would get, on which its points depend."""
    spec, base = read(json.loads(new.document)), decode(JobSpec, json.loads(new.spec))
    trials = await asyncio.to_thread(_first, spec, number, min(_SHOWN, total(spec, new.budget) or _SHOWN))
    specs = [trial_spec(base, f"{new.name}-{trial.number}", trial.settings, spec.options) for trial in trials]
    dry = await jobs.preview(specs[0], new.user)
    return SweepPlan(
        new.name,
        spec.method,
        spec.metric.name if spec.metric else None,
        spec.goal,
        spec.pruning.kind if spec.pruning else None,
        tuple(Searched(one.name, words_of(one)) for one in spec.parameters),
        grid_size(spec.parameters),
        total(spec, new.budget),
        new.budget,
        tuple(PlannedTrial(one.number, one.settings, made.argv) for one, made in zip(trials, specs, strict=True)),
        dry.starts_now,
        ", ".join(dry.placement.nodes) if dry.placement else "",
        dry.reason,
        spec.notes,
    )


def _first(spec: SweepSpec, number: int, count: int) -> list[Trial]:
    chooser, trials = Chooser(number, spec, []), list[Trial]()
    for at in range(1, count + 1):
        try:
            chosen = chooser.choose(trials, at)
        except UsedUp:
            break
        trials.append(Trial(at, chosen.settings, chosen.asked, TrialState.RUNNING, memory=chosen.memory))
        chooser.note(trials[-1])
    return trials


# --- service ----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_LOOK_S = 5.0  # without a signal
_LEAST_S = 0.05  # between two looks: metrics arrive all the time
_REST = 4  # times as long as a look keeps the agent busy
_SHOW_S = 0.3  # between two reports of a stream
_SHOW_TRIAL_S = 0.001  # more for each trial: a report has all of them
_IDLE_S = 600.0
_PLAN_HINT = "to see the plan of a worker: ugro launch SCRIPT --dry-run"
_RECORD_S = 10.0  # of time that a crash may forget


class SweepService:
    def __init__(
        self,
        store: Store,
        jobs: JobService,
        moved: ChangeSignal,
        measuring: Measuring,
        grown: ChangeSignal,
        studies: Studies,
    ) -> None:
        """``moved``: some job has; ``grown``: some metric has."""
        self.sweeps: SweepStore = store.sweeps
        self.store: JobStore = store.jobs
        self.jobs = jobs
        self.measuring = measuring
        self._signals = (moved, grown, measuring.listening.grown)
        self._asked = ChangeSignal()  # by a person
        self.changed = ChangeSignal()  # what reports show
        self._runners: dict[int, Runner] = {}
        self._studies = studies
        self.is_ending = False

    # --- requests ----------------------------------------------------------------------------------------------

    async def create(self, request: SweepRequest) -> SweepReport | Needs:
        if (known := await self.sweeps.created(request.submit.key)) is not None:
            return await self._report(known)
        new = await prepare(request, self.jobs)
        if isinstance(new, Needs):
            return new
        sweep = await self.sweeps.create(new)
        point("sweep.created")
        self._asked.notify()
        return await self._report(sweep)

    async def plan(self, request: SweepRequest) -> SweepPlan | Needs:
        """What it would do; records and starts nothing."""
        if request.study:
            raise UsageError("a study has no --dry-run: its script chooses the points", hint=_PLAN_HINT)
        new = await prepare(request, self.jobs)
        return new if isinstance(new, Needs) else await preview(new, await self.sweeps.next_number(), self.jobs)

    @answers(operations.ListSweeps)
    async def listed(self, asked: operations.ListSweeps, caller: Caller) -> operations.SweepList:
        return operations.SweepList(tuple(await self.newest(asked.limit)))

    async def newest(self, limit: int) -> list[SweepReport]:
        """Of those that the caller may see."""
        return [await self._report(sweep) for sweep in await self.sweeps.newest(limit, viewer())]

    async def find(self, word: str) -> Sweep:
        """Among those that the caller may see. Raises NotFound."""
        return await self.sweeps.find(word, viewer())

    @answers(operations.GetSweep)
    async def get(self, asked: operations.GetSweep, caller: Caller) -> operations.FoundSweep:
        return operations.FoundSweep(await self.report(asked.word, with_history=asked.history))

    async def report(self, word: str, *, with_history: bool = False) -> SweepReport:
        return await self._report(await self.find(word), with_history=with_history)

    @answers(operations.GetSweepDocument)
    async def document(self, asked: operations.GetSweepDocument, caller: Caller) -> operations.SweepDocument:
        sweep = await self.find(asked.word)
        found: dict[str, Any] = json.loads(sweep.document)
        return operations.SweepDocument(found if caller.knows_values_of(sweep.user) else without_values(found))

    @answers(operations.StopSweep)
    async def stop(self, asked: operations.StopSweep, caller: Caller) -> operations.FoundSweep:
        sweep = await self.find(asked.word)
        if sweep.state is SweepState.RUNNING:
            sweep = await self.sweeps.move(sweep.id, SweepState.STOPPED, "stopped by a person")
            point("sweep.stopped")
        self._asked.notify()
        return operations.FoundSweep(await self._report(sweep))

    @answers(operations.ResumeSweep)
    async def resume(self, asked: operations.ResumeSweep, caller: Caller) -> operations.FoundSweep:
        sweep = await self.find(asked.word)
        rows = await self.sweeps.trials(sweep.id, with_history=False)
        ended = sum(row.state is TrialState.COMPLETE for row in rows) if _is_study(sweep) else 0
        failed = sum(row.state is TrialState.FAILED for row in rows)
        budget = replace(_extended(sweep.budget, asked), workers_ended=ended, failed_before=failed)
        sweep = await self.sweeps.move(sweep.id, SweepState.RUNNING, "", budget)
        self._asked.notify()
        return operations.FoundSweep(await self._report(sweep))

    @answers(operations.GetImportance)
    async def get_importance(self, asked: operations.GetImportance, caller: Caller) -> operations.SweepImportance:
        return operations.SweepImportance(await self.importance(asked.word))

    async def importance(self, word: str) -> tuple[Importance, ...]:
        sweep = await self.find(word)
        if _is_study(sweep):
            return await asyncio.to_thread(study_importances, (await self._host(sweep.id)).path)
        trials = await self.sweeps.trials(sweep.id)
        return await asyncio.to_thread(importances, read(json.loads(sweep.document)), trials)

    @answers(operations.LaunchBestOfSweep)
    async def launch_best(self, asked: operations.LaunchBestOfSweep, caller: Caller) -> operations.LaunchedBest:
        sweep = await self.find(asked.word)
        if _is_study(sweep):
            raise NotAllowed("the script of a study chooses its parameters itself", hint="ugro launch SCRIPT")
        trials = await self.sweeps.trials(sweep.id, with_history=False)
        spec = read(json.loads(sweep.document))
        best = best_trial(spec.metric, trials)
        if best is None:
            raise NotAllowed(f"sweep {sweep.name} has no best trial yet", hint=f"see: ugro sweep status {sweep.name}")
        base, name = decode(JobSpec, json.loads(sweep.spec)), f"{sweep.name[:50]}-best"
        made = await trial_job(base, name, best.settings, spec.options, self.jobs)
        owner = owner_of_copy(sweep.user, asked.user)
        return operations.LaunchedBest(await self.jobs.submit_made(made, owner, asked.key, is_asked=True))

    @answers(operations.WatchSweep)
    async def watch(self, asked: operations.WatchSweep, caller: Caller) -> AsyncGenerator[list[SweepReport]]:
        return self._watched((await self.find(asked.word)).id)  # a newer sweep may get the same name

    async def _watched(self, number: int) -> AsyncGenerator[list[SweepReport]]:
        while not self.is_ending:
            seen = self.changed.count
            found = await self._report(await self.sweeps.get(number))
            yield [found]
            if found.is_over:
                return
            await asyncio.sleep(min(_LOOK_S, max(_SHOW_S, len(found.trials) * _SHOW_TRIAL_S)))
            await self.changed.wait(seen, _LOOK_S)
        raise agent_stops()

    def end_streams(self) -> None:
        self.is_ending = True
        self.changed.notify()

    # --- the loop ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:  # of what is followed on nodes
            self.measuring.listening.begin(group)
            await self._drive(group)

    async def _drive(self, group: asyncio.TaskGroup) -> None:
        since = time.monotonic()
        self._runners.clear()
        while True:
            seen = {signal: signal.count for signal in (*self._signals, self._asked)}
            asked, busy_s = {self._asked: self._asked.count}, time.thread_time()
            await self._load(group)
            now, passed_s = time.monotonic(), time.monotonic() - since
            for runner in list(self._runners.values()):
                await self._step(runner, passed_s)
            since = now  # what the steps took counts the next time
            if self._runners:
                await asyncio.sleep(max(_LEAST_S, _REST * (time.thread_time() - busy_s)))
                await wait_for_any(seen, _SHOW_S if self.measuring.is_waiting else _LOOK_S)
            else:
                await wait_for_any(asked, _IDLE_S)
                since = time.monotonic()

    async def _load(self, group: asyncio.TaskGroup) -> None:
        found = {sweep.id: sweep for sweep in await self.sweeps.unfinished()}
        for number in self._runners.keys() - found.keys():
            runner = self._runners.pop(number)
            runner.leave()
            await self._record_time(runner)
            self.changed.notify()
        for number, sweep in found.items():
            if (known := self._runners.get(number)) is not None:
                known.sweep = replace(sweep, elapsed_s=known.sweep.elapsed_s)
            else:
                await self._take_up(sweep, group)

    async def _take_up(self, sweep: Sweep, group: asyncio.TaskGroup) -> None:
        try:
            self._runners[sweep.id] = await self._runner(sweep, await self.sweeps.trials(sweep.id), group)
        except UgroError as error:  # its journal cannot be read: that is no reason for others to wait
            log.error("sweep %s cannot continue: %s", sweep.name, error)
            await self.sweeps.end(sweep.id, SweepState.STOPPED, str(error))

    async def _runner(self, sweep: Sweep, trials: list[Trial], group: asyncio.TaskGroup) -> Runner:
        if not _is_study(sweep):
            return Runner(self, sweep, trials, self.changed.notify)
        runner = StudyRunner(self, sweep, trials, self.changed.notify, await self._host(sweep.id))
        runner.group = group
        return runner

    async def _host(self, sweep: int) -> StudyHost:
        return await self._studies.host(sweep, self.changed.notify)

    async def _step(self, runner: Runner, passed_s: float) -> None:
        reason = ""
        try:
            await runner.step()
        except UgroError as error:  # a node or the cluster file may come back: it is tried again
            reason = problem_of(error)
            log.warning("sweep %s %s", runner.sweep.name, reason)
        if runner.sweep.state is not SweepState.RUNNING:
            return
        runner.more_s += passed_s
        if runner.more_s >= _RECORD_S:
            await self._record_time(runner)
        if reason != runner.sweep.reason:
            await self.sweeps.say(runner.sweep.id, reason)
            self.changed.notify()

    async def _record_time(self, runner: Runner) -> None:
        seconds, runner.more_s = runner.more_s, 0.0
        runner.sweep = replace(runner.sweep, elapsed_s=runner.sweep.elapsed_s + seconds)
        await self.sweeps.add_time(runner.sweep.id, seconds)

    # --- reports -----------------------------------------------------------------------------------------------

    async def _report(self, sweep: Sweep, *, with_history: bool = False) -> SweepReport:
        runner = self._runners.get(sweep.id)
        known = runner.shown if runner else await self.sweeps.trials(sweep.id, with_history=with_history)
        trials = [replace(one, memory="", history=one.history if with_history else ()) for one in known]
        elapsed_s = sweep.elapsed_s + (runner.more_s if runner else 0.0)
        if _is_study(sweep):
            try:
                host = await self._host(sweep.id)
            except UgroError as error:
                return study_report(replace(sweep, reason=str(error)), trials, None, elapsed_s)
            return study_report(sweep, trials, host, elapsed_s)
        spec = read(json.loads(sweep.document))
        view = View(spec, sweep.budget, trials, elapsed_s=elapsed_s)
        best = best_trial(spec.metric, trials)
        return SweepReport(
            sweep.id,
            sweep.name,
            sweep.user,
            sweep.state,
            sweep.reason,
            sweep.created_at,
            spec.method,
            spec.metric.name if spec.metric else None,
            spec.goal,
            spec.varying,
            sweep.budget,
            total(spec, sweep.budget),
            tuple(trials),
            best.number if best else None,
            eta_s(view) if sweep.state is SweepState.RUNNING else None,
            spec.notes,
            scales(spec),
        )


def _is_study(sweep: Sweep) -> bool:
    return bool(json.loads(sweep.document).get("method") == METHOD)


def _extended(budget: Budget, how: operations.ResumeSweep) -> Budget:
    trials = budget.trials if how.trials is None else how.trials
    parallel = budget.parallel if how.parallel is None else how.parallel
    return replace(budget, trials=trials, parallel=parallel)
