"""A sweep: one training with many settings, each of them a trial, and each trial an ordinary job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

KEY = "sweep-"  # how the keys of trials' submissions begin
METHODS = ("grid", "random", "bayes", "tpe", "gp", "cmaes", "qmc")
PRUNERS = ("asha", "median", "hyperband", "wilcoxon")


class SweepState(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"  # by a person, or because too much failed; can be resumed
    FAILED = "failed"  # no trial of it succeeded; can be resumed
    DONE = "done"  # its budget or its space is used up, or its target reached; can be extended


class TrialState(StrEnum):
    PENDING = "pending"  # recorded; its job may not be submitted yet
    RUNNING = "running"  # it has a job; while that has not started, reports say pending
    COMPLETE = "complete"
    PRUNED = "pruned"  # ended early, because others were better at the same step
    FAILED = "failed"
    INFEASIBLE = "infeasible"  # it needs more memory than its device has
    CANCELLED = "cancelled"  # a person has cancelled its job
    STOPPED = "stopped"  # with the whole sweep; its point is tried again when the sweep is resumed


OPEN_STATES = frozenset({TrialState.PENDING, TrialState.RUNNING})
Settings = tuple[tuple[str, str], ...]  # names of parameters, with their values as JSON


@dataclass(frozen=True, slots=True)
class Point:
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Trial:
    number: int
    settings: Settings
    asked: tuple[tuple[str, float], ...] = ()  # the same point as the sampler sees it
    state: TrialState = TrialState.PENDING
    job: int | None = None
    last: float | None = None  # of its metric
    best: float | None = None
    step: int | None = None  # of its newest value
    took_s: float | None = None
    gpus: int = 0
    reason: str = ""
    ending: TrialState | None = None  # its job was asked to end, and what the trial is then
    history: tuple[Point, ...] = ()
    memory: str = ""  # what its sampler wants to find again, as JSON

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def values(self) -> dict[str, Any]:
        return {name: json.loads(text) for name, text in self.settings}


@dataclass(frozen=True, slots=True)
class Budget:
    """What a sweep may use. ``None``: no limit."""

    trials: int | None = None
    time_s: float | None = None
    gpu_s: float | None = None
    no_improvement: int | None = None  # ends after so many trials without a better one
    parallel: int | None = None  # trials at once; None: as many as fit
    max_failed: int | None = None
    trials_per_gpu: int = 1
    workers_ended: int = 0  # of a study: by themselves, before it was resumed
    failed_before: int = 0  # trials, or workers of a study, before it was resumed: they stop it only once


@dataclass(frozen=True, slots=True)
class Sweep:
    id: int
    name: str
    user: str
    state: SweepState
    reason: str
    document: str  # what it searches, as JSON in the format of the file
    spec: str  # of its jobs, as JSON
    budget: Budget
    created_at: str
    elapsed_s: float = 0.0  # while it was running

    @property
    def is_private(self) -> bool:
        return bool(json.loads(self.spec).get("private", False))


@dataclass(frozen=True, slots=True)
class Scale:
    """How the values of a parameter are placed on an axis. ``None``: no end is known."""

    name: str
    kind: str = "float"  # or "int", "choice"
    is_log: bool = False
    low: float | None = None
    high: float | None = None
    values: tuple[str, ...] = ()  # of a choice, as JSON


@dataclass(frozen=True, slots=True)
class SweepReport:
    """A sweep as it is shown."""

    id: int
    name: str
    user: str
    state: SweepState
    reason: str
    created_at: str
    method: str
    metric: str | None
    goal: str
    parameters: tuple[str, ...]  # that vary
    budget: Budget
    total: int | None  # trials in all, as far as that is known
    trials: tuple[Trial, ...]
    best: int | None = None  # number of the best trial
    eta_s: float | None = None
    notes: tuple[str, ...] = ()
    scales: tuple[Scale, ...] = ()  # of the parameters that vary
    workers: tuple[Trial, ...] = ()  # of a study: the jobs that make its trials

    @property
    def is_over(self) -> bool:
        """A trial of a study may wait for a worker for ever: there its workers count."""
        jobs = self.workers or self.trials
        return self.state is not SweepState.RUNNING and not any(one.is_open for one in jobs)

    @property
    def best_trial(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.number == self.best), None)


@dataclass(frozen=True, slots=True)
class Searched:
    """One parameter, in words."""

    name: str
    words: str


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    number: int
    settings: Settings
    argv: tuple[str, ...]

    @property
    def values(self) -> dict[str, Any]:
        return {name: json.loads(text) for name, text in self.settings}


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep would do; nothing of it is recorded."""

    name: str
    method: str
    metric: str | None
    goal: str
    prune: str | None
    space: tuple[Searched, ...]
    points: int | None  # of the space; None: without end
    total: int | None
    budget: Budget
    first: tuple[PlannedTrial, ...]  # if no trial ends meanwhile
    starts_now: bool  # the first of them
    where: str  # the nodes it would get
    reason: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Importance:
    parameter: str
    share: float  # of what all parameters explain


def trial_key(sweep: int, number: int) -> str:
    return f"{KEY}{sweep}-{number}"
