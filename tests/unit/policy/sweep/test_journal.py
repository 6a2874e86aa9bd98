"""The journal of a study adds up to what Optuna itself reads in the same file, also after a worker was lost."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from random import Random
from typing import Any

import optuna
import pytest

from ugro.features.sweeps.model import Budget, Trial, TrialState
from ugro.features.sweeps.rules.decision import Act, StudyView, decide_workers
from ugro.features.sweeps.rules.journal import Journal, State, Worker, of_lost, shown
from ugro.features.sweeps.service.studies import JournalFile
from ugro.kernel.support.errors import UgroError

AT = "2026-01-01T00:00:00.000000+00:00"
_SHOWN = {
    optuna.trial.TrialState.RUNNING: TrialState.RUNNING,
    optuna.trial.TrialState.WAITING: TrialState.PENDING,
    optuna.trial.TrialState.COMPLETE: TrialState.COMPLETE,
    optuna.trial.TrialState.PRUNED: TrialState.PRUNED,
    optuna.trial.TrialState.FAIL: TrialState.FAILED,
}


class Marked:
    """A backend of Optuna's that writes through UGRO's file, as a worker does over its connection."""

    def __init__(self, file: JournalFile, worker: Worker) -> None:
        self._file = file
        self._worker = worker

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.lines(log_number_from)]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        marks = {"job": self._worker.job, "attempt": self._worker.attempt}
        self._file.append([{**log, "ugro": marks} for log in logs])


def study_of(storage: Any, direction: str = "minimize") -> optuna.Study:
    sampler = optuna.samplers.RandomSampler(seed=1)
    return optuna.create_study(
        storage=storage, study_name="s", load_if_exists=True, direction=direction, sampler=sampler
    )


def optunas(path: Path) -> optuna.Study:
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    return optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend))


@pytest.mark.parametrize("seed", range(5))
def test_optuna_reads_the_same_trials(tmp_path: Path, seed: int) -> None:
    chance, path = Random(seed), tmp_path / "journal.log"
    file = JournalFile(path)
    studies = [study_of(optuna.storages.JournalStorage(Marked(file, Worker(job, 1)))) for job in (1, 2)]
    studies[0].enqueue_trial({"x": 1.0, "k": "b"})
    for number in range(12):
        trial = studies[number % 2].ask()
        value = trial.suggest_float("x", -5, 5) + trial.suggest_int("n", 1, 3)
        trial.suggest_categorical("k", ["a", "b"])
        trial.report(value, 1)
        how = chance.randrange(4)
        if how == 0:
            studies[number % 2].tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif how < 3:
            studies[number % 2].tell(trial, value)
    lost = [trial for trial in file.journal.running() if trial.worker == Worker(2, 1)]
    file.append([one for trial in lost for one in of_lost(trial, AT, 1)])
    again, theirs = JournalFile(path), optunas(path).get_trials()
    found = again.journal.first
    assert found is not None
    assert [(one.number, one.state, one.values) for one in shown(found)] == [
        (one.number, _SHOWN[one.state], one.params) for one in theirs
    ]
    assert [one.value for one in theirs if one.state.is_finished() and one.value is not None] == [
        one.best for one in shown(found) if one.state is TrialState.COMPLETE or (one.best is not None)
    ]
    assert sum(trial.is_lost for trial in found.trials) == len(lost)
    waiting = [trial for trial in theirs if trial.state is optuna.trial.TrialState.WAITING]
    assert [trial.system_attrs["failed_trial"] for trial in waiting] == [trial.number for trial in lost]


def test_a_lost_trial_is_queued_again_so_often_and_counts_once(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "journal.log")
    study = study_of(optuna.storages.JournalStorage(Marked(file, Worker(1, 1))))
    study.ask().suggest_float("x", 0, 1)
    for retry in range(3):
        [running] = file.journal.running()
        file.append(of_lost(running, AT, 2))
        found = file.journal.first
        assert found is not None
        assert found.counted == (1 if retry < 2 else 0)
        if retry < 2:
            study.ask().suggest_float("x", 0, 1)
    assert len(study.get_trials()) == 3
    assert len({trial.params["x"] for trial in study.get_trials()}) == 1, "the same point"


def test_the_rest_of_a_line_that_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    file = JournalFile(path)
    study = study_of(optuna.storages.JournalStorage(Marked(file, Worker(1, 1))))
    study.ask()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 4, "study')
    again = JournalFile(path)
    assert again.count == file.count
    again.append([{"op_code": 4, "worker_id": "w", "study_id": 0, "datetime_start": AT}])
    assert len(optunas(path).get_trials()) == 2


def test_a_disk_that_is_full_after_the_first_line_takes_none_of_them(tmp_path: Path) -> None:
    """A lost trial would have failed, and its point would not be queued again."""
    file = JournalFile(tmp_path / "journal.log")
    study_of(optuna.storages.JournalStorage(Marked(file, Worker(1, 1)))).ask().suggest_float("x", 0, 1)
    [running] = file.journal.running()
    operations, before = of_lost(running, AT, 1), file.count
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = file.path.stat().st_size + len(json.dumps(operations[0])) + 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(UgroError, match="too large"):
            file.append(operations)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (file.count, JournalFile(file.path).count) == (before, before)
    file.append(operations)
    assert [trial.state.name for trial in optunas(file.path).get_trials()] == ["FAIL", "WAITING"]


@pytest.mark.parametrize(
    "operation",
    [
        *({}, {"op_code": 99}, {"op_code": 4}, {"op_code": "x"}, {"op_code": 4, "study_id": 0, "params": {"x": 1}}),
        *([1], {"op_code": 4, "study_id": float("inf")}),
    ],
)
def test_what_is_no_operation_is_refused_and_changes_nothing(tmp_path: Path, operation: Any) -> None:
    file = JournalFile(tmp_path / "journal.log")
    file.append([{"op_code": 0, "worker_id": "w", "study_name": "s", "directions": [1]}])
    with pytest.raises(ValueError, match="invalid operation"):
        file.append([operation])
    assert (file.count, file.journal.count) == (1, 1)
    assert len(JournalFile(file.path).lines(0)) == 1


@pytest.mark.parametrize("distribution", ["", "[]", '{"name": "CategoricalDistribution"}', "[" * 100_000])
def test_a_parameter_of_a_strange_kind_is_shown_as_its_number(tmp_path: Path, distribution: str) -> None:
    file = JournalFile(tmp_path / "journal.log")
    file.append([{"op_code": 0, "worker_id": "w", "study_name": "s", "directions": [1]}])
    file.append([{"op_code": 4, "study_id": 0, "params": {"x": 3.0}, "distributions": {"x": distribution}}])
    assert file.journal.first is not None
    assert shown(file.journal.first)[0].settings == (("x", "3.0"),)


def test_a_request_that_was_answered_is_known_after_a_restart(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / "journal.log")
    marks = {"job": 1, "attempt": 1, "client": "1/1/c", "request": 7, "limit": 30}
    file.append([{"op_code": 0, "worker_id": "w", "study_name": "s", "directions": [1], "ugro": marks}])
    again = JournalFile(file.path).journal
    assert (again.newest, again.limit) == ({"1/1/c": 7}, 30)


def worker(number: int, state: TrialState) -> Trial:
    return Trial(number, (("worker", str(number)),), state=state, job=number)


@pytest.mark.parametrize(
    ("view", "act"),
    [
        (StudyView([], Budget()), Act.TRY),
        (StudyView([worker(1, TrialState.RUNNING)], Budget(parallel=2)), Act.TRY),
        (StudyView([worker(1, TrialState.RUNNING)], Budget(parallel=1)), Act.WAIT),
        (StudyView([worker(1, TrialState.RUNNING)], Budget(), waiting=1), Act.WAIT),
        (StudyView([worker(1, TrialState.RUNNING)], Budget(), limit=5, ended=4), Act.WAIT),
        (StudyView([worker(1, TrialState.COMPLETE)], Budget(), limit=5, ended=5), Act.END),
        (StudyView([worker(1, TrialState.FAILED)], Budget(), limit=5, ended=4), Act.TRY),
        (StudyView([worker(1, TrialState.COMPLETE)], Budget()), Act.END),
        (StudyView([worker(1, TrialState.COMPLETE)], Budget(workers_ended=1)), Act.TRY),
        (StudyView([worker(n, TrialState.FAILED) for n in (1, 2, 3)], Budget()), Act.STOP),
        (StudyView([worker(n, TrialState.FAILED) for n in (1, 2, 3)], Budget(failed_before=3)), Act.TRY),
        (StudyView([worker(1, TrialState.RUNNING)], Budget(time_s=5), elapsed_s=6), Act.WAIT),
    ],
)
def test_workers_are_added_as_long_as_there_is_something_to_do(view: StudyView, act: Act) -> None:
    assert decide_workers(view).act is act


def test_an_operation_that_comes_too_late_changes_nothing() -> None:
    journal = Journal()
    journal.apply({"op_code": 0, "study_name": "s", "directions": [2]})
    journal.apply({"op_code": 4, "study_id": 0, "datetime_start": AT})
    journal.apply({"op_code": 6, "trial_id": 0, "state": 1, "values": [3.0]})
    journal.apply({"op_code": 6, "trial_id": 0, "state": 3, "values": None})
    study = journal.first
    assert study is not None
    assert (study.trials[0].state, study.trials[0].values, study.is_maximized) == (State.COMPLETE, (3.0,), True)
