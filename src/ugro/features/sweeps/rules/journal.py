"""The journal of an Optuna study: what its operations add up to. Pure; Optuna itself is not needed.

Each operation is one JSON object, as Optuna's ``JournalStorage`` writes and reads them; Optuna can open the same file.
UGRO adds one key, ``ugro``: the job and the attempt that wrote it, and the number of its request. Operations are
applied in their order, by the same rules as Optuna's: what comes too late changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ugro.features.sweeps.model import Point, Trial, TrialState
from ugro.features.sweeps.rules.spec import dumps

AGENT = "ugro-agent"  # as the writer of operations
LOST = "ugro:lost"  # an attribute of a trial whose worker has ended
MOST_OPERATION = 4 << 20  # bytes


class Operation(IntEnum):
    CREATE_STUDY = 0
    DELETE_STUDY = 1
    CREATE_TRIAL = 4
    SET_PARAM = 5
    SET_STATE = 6
    SET_INTERMEDIATE = 7
    SET_SYSTEM_ATTR = 9
    LARGEST = 10


class State(IntEnum):
    RUNNING = 0
    COMPLETE = 1
    PRUNED = 2
    FAIL = 3
    WAITING = 4


_ENDED = (State.COMPLETE, State.PRUNED, State.FAIL)
_SHOWN = {
    State.RUNNING: TrialState.RUNNING,
    State.WAITING: TrialState.PENDING,
    State.COMPLETE: TrialState.COMPLETE,
    State.PRUNED: TrialState.PRUNED,
    State.FAIL: TrialState.FAILED,
}


@dataclass(frozen=True, slots=True)
class Worker:
    """An attempt of a job that runs the script."""

    job: int
    attempt: int


@dataclass(slots=True)
class StudyTrial:
    id: int
    number: int
    study: int
    state: State
    worker: Worker | None = None
    is_lost: bool = False  # its worker ended while it ran
    params: dict[str, tuple[float, str]] = field(default_factory=dict)  # as Optuna stores them, with the distribution
    values: tuple[float, ...] = ()
    steps: dict[int, float] = field(default_factory=dict)
    system_attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def retry_history(self) -> list[int]:
        return [*self.system_attrs.get("retry_history", ()), self.number]


@dataclass(slots=True)
class Study:
    id: int
    name: str
    is_maximized: bool
    trials: list[StudyTrial] = field(default_factory=list)

    @property
    def counted(self) -> int:
        """Of its budget: a trial whose worker was lost is made again, or replaced."""
        return sum(not trial.is_lost for trial in self.trials)

    @property
    def ended(self) -> int:
        return sum(trial.state in _ENDED and not trial.is_lost for trial in self.trials)


class Journal:
    def __init__(self) -> None:
        self.count = 0  # of operations
        self.studies: dict[int, Study] = {}
        self._trials: list[StudyTrial] = []
        self._names = 0
        self.newest: dict[str, int] = {}  # by client, the number of its newest request
        self.limit: int | None = None  # of trials, as the script has said

    @property
    def first(self) -> Study | None:
        return next(iter(self.studies.values()), None)

    def running(self) -> Iterable[StudyTrial]:
        return [trial for trial in self._trials if trial.state is State.RUNNING and trial.worker is not None]

    def apply(self, operation: Mapping[str, Any]) -> None:
        """Raises ValueError if it is none; then nothing has changed."""
        try:
            self._apply(Operation(operation["op_code"]), operation)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
            raise ValueError(f"invalid operation: {error!r:.100}") from error
        self.count += 1
        marks = operation.get("ugro")
        if isinstance(marks, dict) and "client" in marks:
            self.newest[str(marks["client"])] = int(marks["request"])
            self.limit = marks.get("limit", self.limit)

    def _apply(self, code: Operation | int, operation: Mapping[str, Any]) -> None:
        if code == Operation.CREATE_STUDY:
            self._create_study(str(operation["study_name"]), list(operation["directions"]))
        elif code == Operation.DELETE_STUDY:
            self.studies.pop(int(operation["study_id"]), None)
        elif code == Operation.CREATE_TRIAL:
            self._create_trial(operation)
        elif "trial_id" in operation:
            self._change(code, operation)

    def _create_study(self, name: str, directions: list[int]) -> None:
        if all(study.name != name for study in self.studies.values()):
            self.studies[self._names] = Study(self._names, name, bool(directions) and int(directions[0]) == 2)
            self._names += 1

    def _create_trial(self, operation: Mapping[str, Any]) -> None:
        study = self.studies.get(int(operation["study_id"]))
        if study is None:
            return
        state = State(int(operation.get("state", State.RUNNING)))
        trial = StudyTrial(len(self._trials), len(study.trials), study.id, state)
        kinds = operation.get("distributions") or {}
        params = operation.get("params") or {}
        trial.params = {str(name): (float(at), str(kinds[name])) for name, at in params.items()}
        trial.system_attrs = dict(operation.get("system_attrs") or {})
        trial.steps = {int(step): float(value) for step, value in (operation.get("intermediate_values") or {}).items()}
        trial.values = _values(operation.get("values") or operation.get("value"))
        trial.worker = _worker(operation) if state is State.RUNNING else None
        self._trials.append(trial)
        study.trials.append(trial)

    def _change(self, code: Operation | int, operation: Mapping[str, Any]) -> None:
        number = int(operation["trial_id"])
        if not 0 <= number < len(self._trials) or self._trials[number].state in _ENDED:
            return
        trial = self._trials[number]
        if code == Operation.SET_PARAM:
            value = float(operation["param_value_internal"])
            trial.params[str(operation["param_name"])] = (value, str(operation["distribution"]))
        elif code == Operation.SET_STATE:
            self._set_state(trial, State(int(operation["state"])), operation)
        elif code == Operation.SET_INTERMEDIATE:
            trial.steps[int(operation["step"])] = float(operation["intermediate_value"])
        elif code == Operation.SET_SYSTEM_ATTR:
            trial.system_attrs.update(operation["system_attr"])
            trial.is_lost = bool(trial.system_attrs.get(LOST))

    def _set_state(self, trial: StudyTrial, state: State, operation: Mapping[str, Any]) -> None:
        if state is State.RUNNING and trial.state is State.RUNNING:
            return  # another one has it
        trial.values = _values(operation.get("values")) or trial.values
        trial.state = state
        if state is State.RUNNING:
            trial.worker = _worker(operation)


def of_lost(trial: StudyTrial, at: str, max_retries: int) -> list[dict[str, Any]]:
    """The operations that end a trial whose worker has ended, and queue its point again. ``at``: now, as RFC 3339."""
    by = {"worker_id": AGENT}
    found: list[dict[str, Any]] = [
        {"op_code": int(Operation.SET_SYSTEM_ATTR), **by, "trial_id": trial.id, "system_attr": {LOST: True}},
        {
            **{"op_code": int(Operation.SET_STATE), **by, "trial_id": trial.id},
            **{"state": int(State.FAIL), "values": None, "datetime_complete": at},
        },
    ]
    history = trial.retry_history
    if not trial.params or len(history) > max_retries:
        return found
    attrs = {key: value for key, value in trial.system_attrs.items() if key != LOST}
    again: dict[str, Any] = {
        **{"op_code": int(Operation.CREATE_TRIAL), **by, "study_id": trial.study, "datetime_start": None},
        **{"state": int(State.WAITING), "value": None, "values": None},
        "distributions": {name: kind for name, (_, kind) in trial.params.items()},
        "params": {name: at for name, (at, _) in trial.params.items()},
        "user_attrs": {},
        "system_attrs": {"failed_trial": history[0], **attrs, "retry_history": history},
        "intermediate_values": {},
    }
    return [*found, again]


def shown(study: Study) -> list[Trial]:
    """Its trials as those of a sweep, with Optuna's own numbers."""
    return [_shown(study, trial) for trial in study.trials]


def _shown(study: Study, trial: StudyTrial) -> Trial:
    settings = tuple((name, dumps(_external(*given))) for name, given in trial.params.items())
    points = tuple(Point(step, trial.steps[step]) for step in sorted(trial.steps) if math.isfinite(trial.steps[step]))
    value = trial.values[0] if trial.values and math.isfinite(trial.values[0]) else None
    choose = max if study.is_maximized else min
    if value is None and trial.state is State.PRUNED and points:
        value = choose(point.value for point in points)
    return Trial(
        trial.number,
        settings,
        state=_SHOWN[trial.state],
        job=trial.worker.job if trial.worker else None,
        last=points[-1].value if points else value,
        best=value,
        step=points[-1].step if points else None,
        reason="its worker ended" if trial.is_lost else "",
        history=points,
    )


def _external(at: float, distribution: str) -> Any:
    """As its script wrote it. A distribution that cannot be read is none of Optuna's: the number is shown."""
    try:
        kind = json.loads(distribution)
        if kind["name"] == "CategoricalDistribution":
            return kind["attributes"]["choices"][int(at)]
        return int(at) if "Int" in str(kind["name"]) else at
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return at


def _values(given: Any) -> tuple[float, ...]:
    if given is None:
        return ()
    return tuple(float(one) for one in given) if isinstance(given, list) else (float(given),)


def _worker(operation: Mapping[str, Any]) -> Worker | None:
    marks = operation.get("ugro")
    return Worker(int(marks["job"]), int(marks["attempt"])) if isinstance(marks, dict) else None
