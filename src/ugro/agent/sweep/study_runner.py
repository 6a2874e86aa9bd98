"""One study that is not over: its workers are jobs, recorded and started like trials; its trials are in its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ugro.agent.sweep.runner import NOT_STARTED, Parts, Runner
from ugro.agent.sweep.study_host import StudyHost
from ugro.core.job import HOLDING_STATES
from ugro.core.sweep import Sweep, SweepState, Trial, TrialState
from ugro.policy.sweep.decision import Decision
from ugro.policy.sweep.journal import Worker
from ugro.policy.sweep.study import StudyView, decide_workers, is_closed, is_full


class StudyRunner(Runner):
    def __init__(
        self, parts: Parts, sweep: Sweep, trials: list[Trial], on_change: Callable[[], None], host: StudyHost
    ) -> None:
        super().__init__(parts, sweep, trials, on_change)
        self._host = host
        host.is_used = True
        self.group: asyncio.TaskGroup | None = None  # of its connections

    async def step(self) -> None:
        self._host.limit = self.sweep.budget.trials
        self._host.is_closed = is_closed(self._study_view()) or self.sweep.state is not SweepState.RUNNING
        await super().step()
        jobs = [job for job in self._found.values() if job.state in HOLDING_STATES and job.held is not None]
        workers = {Worker(job.id, job.attempt): job.held.nodes[0] for job in jobs if job.held is not None}
        assert self.group is not None
        self._host.keep(workers, self.group)
        await self._host.end_lost(set(workers), self._base.retry.max_retries)
        if is_full(self._study_view()):
            for trial in self.open:
                if (job := self._found.get(trial.number)) is not None and job.state in NOT_STARTED:
                    await self._end(trial, TrialState.STOPPED, "the study has all its trials")

    def leave(self) -> None:
        assert self.group is not None
        self._host.keep({}, self.group)
        self._host.is_used = False

    def decision(self) -> Decision:
        return decide_workers(self._study_view())

    def _study_view(self) -> StudyView:
        view, study = self.view(), self._host.study
        counted, ended = (study.counted, study.ended) if study else (0, 0)
        return StudyView(
            view.trials, self.sweep.budget, self._host.most, counted, ended, view.waiting, view.elapsed_s
        )
