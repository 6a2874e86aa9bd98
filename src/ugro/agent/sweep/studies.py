"""The studies whose journals are open, and how one is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from ugro.agent.sweep.study_host import Dial, StudyHost
from ugro.core.errors import NotAllowed
from ugro.core.sweep import Importance, Sweep, SweepReport, SweepState, Trial, TrialState
from ugro.policy.sweep.decision import best_trial
from ugro.policy.sweep.journal import shown
from ugro.policy.sweep.spec import Goal, Metric

METHOD = "study"
_MOST_OPEN = 32


class Studies:
    def __init__(self, folder: Path, dial: Dial) -> None:
        self._folder = folder
        self._dial = dial
        self._hosts: dict[int, StudyHost] = {}

    async def host(self, sweep: int, on_change: Callable[[], None]) -> StudyHost:
        """The same object as long as it is used."""
        if sweep not in self._hosts:
            # Never one that is used: a second one for the same journal would know only what was there when it read it.
            for number in [number for number, host in self._hosts.items() if not host.is_used][_MOST_OPEN:]:
                del self._hosts[number]
            host = await asyncio.to_thread(StudyHost, self._folder / str(sweep) / "journal.log", self._dial, on_change)
            self._hosts.setdefault(sweep, host)
        return self._hosts[sweep]


def study_report(sweep: Sweep, workers: Sequence[Trial], host: StudyHost | None, elapsed_s: float) -> SweepReport:
    """``host``: None if its journal cannot be read."""
    study = host.study if host else None
    trials = shown(study) if study else []
    goal: Goal = "maximize" if study and study.is_maximized else "minimize"
    best = best_trial(Metric("value", goal), [trial for trial in trials if trial.state is TrialState.COMPLETE])
    most = host.most if host and sweep.budget.trials is None else sweep.budget.trials
    ended = study.ended if study else 0
    left_s = None
    if sweep.state is SweepState.RUNNING and most is not None and ended and elapsed_s > 0:
        left_s = max(0, most - ended) * elapsed_s / ended
    return SweepReport(
        sweep.id,
        sweep.name,
        sweep.user,
        sweep.state,
        sweep.reason,
        sweep.created_at,
        METHOD,
        "value",
        goal,
        tuple(dict.fromkeys(name for trial in trials for name, _ in trial.settings)),
        sweep.budget,
        most,
        tuple(trials),
        best.number if best else None,
        left_s,
        workers=tuple(workers),
    )


def study_importances(path: Path) -> tuple[Importance, ...]:
    """By Optuna, from the journal itself. Raises NotAllowed."""
    from ugro.agent.sweep.optuna_study import load_optuna, require

    require("tpe")
    if not path.exists():
        raise NotAllowed("importances need some complete trials; there are none yet", hint="let more trials end")
    optuna = load_optuna()
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    names = [one.study_name for one in storage.get_all_studies()]
    try:
        study = optuna.load_study(study_name=names[0], storage=storage)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (ValueError, RuntimeError, IndexError) as error:
        raise NotAllowed(f"importances need some complete trials: {error}", hint="let more trials end") from error
    return tuple(Importance(name, float(share)) for name, share in found.items())
