"""The next point of a sweep. A grid and a random search need nothing else; Optuna decides for the other methods."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from ugro.features.sweeps.model import Importance, Settings, Trial, TrialState
from ugro.features.sweeps.rules.spec import (
    Kind,
    Metric,
    Parameter,
    SweepSpec,
    grid_settings,
    grid_size,
    place_of,
    random_place,
    settings,
)
from ugro.kernel.support.errors import NotAllowed, UgroError

if TYPE_CHECKING:
    import optuna


# --- optuna study -----------------------------------------------------------------------------------------------------
# Optuna's view of a sweep: a study that is made from the recorded trials, and what its sampler asks for next.
#
# Optuna is imported here, in a thread, when it is first needed. Some samplers note in their study how far they are
# (CMA-ES its distribution, QMC the place in its sequence): a trial's row keeps what was noted when it was asked for.


_EXTRA = ("optuna", "cmaes", "scipy")  # of ugro[sweep]
_NEEDED = {
    "bayes": ("optuna",),
    "tpe": ("optuna",),
    "gp": ("optuna", "scipy", "torch"),
    "cmaes": ("optuna", "cmaes"),
    "qmc": ("optuna", "scipy"),
    "wilcoxon": ("optuna", "scipy"),
}
_NOTED = ("cma:", "qmc:")  # how the notes begin that a sampler must find again
_GENERATION = "cma:generation"
_MEMORY = "memory"  # a constraint: above 0 it does not fit
_LEAST_EXPLAINED = 4  # complete trials
_importing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Proposal:
    place: dict[str, float]
    notes: str  # of the sampler, as JSON

    @property
    def notes_without_point(self) -> str:
        """If the point was not used: the sampler must not take another one for its own."""
        kept = json.loads(self.notes) if self.notes else {}
        kept.get("trial", {}).pop(_GENERATION, None)
        return json.dumps(kept) if kept else ""


def require(*names: str) -> None:
    """Of methods and pruners. Raises NotAllowed if a package is missing."""
    for name in names:
        for package in _NEEDED.get(name, ()):
            if importlib.util.find_spec(package) is None:
                install = "'ugro[sweep]'" if package in _EXTRA else package
                what = "prune" if name == "wilcoxon" else "method"
                hint = f"on this machine: pip install {install}, then ugro agent restart; without it: grid or random"
                raise NotAllowed(f"{what} {name} needs {package}, which is not installed", hint=hint)


def ask(spec: SweepSpec, trials: Sequence[Trial], seeds: tuple[int, int]) -> Proposal:
    """What Optuna proposes, having seen these trials. ``seeds``: of this trial, and of the whole sweep.

    Raises UgroError if it cannot.
    """
    require(spec.method)
    study = study_of(spec, trials, _sampler(spec.method, seeds))
    try:
        asked = study.ask(_distributions(spec.parameters))
    except (ValueError, RuntimeError, ArithmeticError) as error:  # numpy's and torch's derive from these
        raise UgroError(f"method {spec.method} failed: {error!r:.200}", hint="try: --method bayes") from error
    place = {name: float(value) for name, value in asked.params.items()}
    return Proposal(place, _notes(study, asked))


def importances(spec: SweepSpec, trials: Sequence[Trial]) -> tuple[Importance, ...]:
    """How much of the differences each parameter explains, the most first. Raises NotAllowed."""
    require("tpe")
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE and trial.best is not None]
    if spec.metric is None or len(complete) < _LEAST_EXPLAINED:
        raise NotAllowed(
            f"importances need a metric and {_LEAST_EXPLAINED} complete trials; there are {len(complete)}",
            hint="let more trials end",
        )
    study = study_of(spec, complete, _sampler("tpe", (0, 0)))
    if len(_distributions(spec.parameters)) == 1:
        return tuple(Importance(name, 1.0) for name in _distributions(spec.parameters))
    evaluator = load_optuna().importance.PedAnovaImportanceEvaluator()
    found = load_optuna().importance.get_param_importances(study, evaluator=evaluator)
    return tuple(Importance(name, float(share)) for name, share in found.items())


def worse_than_best(spec: SweepSpec, trials: Sequence[Trial]) -> list[Trial]:
    """The running trials that Optuna's WilcoxonPruner ends: at the steps that both have, worse than the best one."""
    require("wilcoxon")
    assert spec.pruning is not None
    running = [trial for trial in trials if trial.state is TrialState.RUNNING and trial.history]
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE and trial.best is not None]
    if not running or not complete:
        return []
    pruner = load_optuna().pruners.WilcoxonPruner(p_threshold=spec.pruning.p, n_startup_steps=spec.pruning.startup)
    study = study_of(spec, complete, _sampler("tpe", (0, 0)))
    return [trial for trial in running if pruner.prune(study, _frozen(spec, trial, 0.0))]


def study_of(spec: SweepSpec, trials: Sequence[Trial], sampler: Any) -> optuna.Study:
    study = load_optuna().create_study(sampler=sampler, direction=spec.goal)
    worst = _worst(spec.metric, trials)
    study.add_trials([_frozen(spec, trial, worst) for trial in trials])
    storage, number = study._storage, study._study_id
    for trial in trials:
        for key, value in _noted(trial).get("study", {}).items():
            storage.set_study_system_attr(number, key, value)
    return study


def _frozen(spec: SweepSpec, trial: Trial, worst: float) -> optuna.trial.FrozenTrial:
    optuna, known = load_optuna(), dict(trial.asked) or place_of(spec.parameters, trial.settings) or {}
    kinds = _distributions(spec.parameters)
    place = {name: known[name] if _is_number(spec, name) else int(known[name]) for name in kinds}
    state = optuna.trial.TrialState
    notes = _noted(trial).get("trial", {})
    given: dict[str, Any] = {"params": place, "distributions": kinds, "system_attrs": notes}
    steps = {point.step: point.value for point in trial.history}
    if trial.state is TrialState.INFEASIBLE:
        made = optuna.trial.create_trial(value=worst, **given)
        made.set_constraint(_MEMORY, 1.0)
        return made
    if _counts(spec, trial):
        made = optuna.trial.create_trial(value=trial.best, intermediate_values=steps, **given)
        made.set_constraint(_MEMORY, 0.0)
        return made
    if trial.state is TrialState.PRUNED and steps:
        return optuna.trial.create_trial(state=state.PRUNED, intermediate_values=steps, **given)
    # What has failed teaches nothing, but keeps the numbers of the others.
    kind = state.RUNNING if trial.is_open else state.FAIL
    return optuna.trial.create_trial(state=kind, intermediate_values=steps, **given)


def _counts(spec: SweepSpec, trial: Trial) -> bool:
    """Also one that was ended early, if its mean so far estimates what it would have been."""
    is_mean = spec.metric is not None and spec.metric.is_mean
    ended = (TrialState.COMPLETE, TrialState.PRUNED) if is_mean else (TrialState.COMPLETE,)
    return trial.best is not None and trial.state in ended


def _noted(trial: Trial) -> dict[str, dict[str, Any]]:
    return json.loads(trial.memory) if trial.memory else {}


def _notes(study: optuna.Study, asked: optuna.Trial) -> str:
    storage = study._storage
    of_trial = storage.get_trial_system_attrs(asked._trial_id)
    of_study = storage.get_study_system_attrs(study._study_id)
    found = {
        name: kept
        for name, notes in (("trial", of_trial), ("study", of_study))
        if (kept := {key: value for key, value in notes.items() if key.startswith(_NOTED)})
    }
    return json.dumps(found) if found else ""


def _is_number(spec: SweepSpec, name: str) -> bool:
    return next(one for one in spec.parameters if one.name == name).axis.kind is Kind.NUMBER


def _worst(metric: Metric | None, trials: Sequence[Trial]) -> float:
    values = [trial.best for trial in trials if trial.best is not None]
    sign = metric.sign if metric else 1
    return max(values, key=lambda value: sign * value, default=0.0)


def _distributions(space: Sequence[Parameter]) -> dict[str, Any]:
    return {one.name: _distribution(one) for one in space if not one.is_constant}


def _distribution(one: Parameter) -> Any:
    kinds, axis = load_optuna().distributions, one.axis
    if axis.kind is Kind.CHOICE:
        return kinds.CategoricalDistribution(range(len(one.values)))
    if axis.kind is Kind.WHOLE:
        return kinds.IntDistribution(int(axis.low), int(axis.high))
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.is_log)


def _sampler(method: str, seeds: tuple[int, int]) -> Any:
    """A sequence has one seed for the whole sweep; other samplers have another one for each trial."""
    samplers, (seed, of_sweep) = load_optuna().samplers, seeds
    if method == "gp":
        return samplers.GPSampler(seed=seed)
    if method == "cmaes":
        return samplers.CmaEsSampler(seed=seed, consider_pruned_trials=True, warn_independent_sampling=False)
    if method == "qmc":
        return samplers.QMCSampler(seed=of_sweep, scramble=True, warn_independent_sampling=False)
    return samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)


def load_optuna() -> Any:
    """Imported when it is first needed."""
    import warnings

    with _importing:
        import optuna

        if optuna.logging.get_verbosity() != optuna.logging.ERROR:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


# --- sampler ----------------------------------------------------------------------------------------------------------


_TRIES = 20  # for a point that is new
_MOST_LISTED = 100_000  # points of a small space, among which a new one is searched

Asked = tuple[tuple[str, float], ...]


class UsedUp(Exception):
    """Every point of the space was tried."""


@dataclass(frozen=True, slots=True)
class Chosen:
    settings: Settings
    asked: Asked = ()  # as the sampler sees it
    memory: str = ""  # what the sampler wants to find again


class Chooser:
    """Chooses for one sweep; remembers how far its grid is used, so that a large one costs no more per trial."""

    def __init__(self, sweep: int, spec: SweepSpec, trials: Sequence[Trial]) -> None:
        self._sweep = sweep
        self._spec = spec
        self._tried = {trial.settings for trial in trials if trial.state is not TrialState.STOPPED}
        self._cursor = 0

    def note(self, trial: Trial) -> None:
        if trial.state is TrialState.STOPPED:
            self._tried.discard(trial.settings)
            self._cursor = 0
        else:
            self._tried.add(trial.settings)

    def choose(self, trials: Sequence[Trial], number: int) -> Chosen:
        """Raises UsedUp. The same trials and the same number give the same point."""
        space = self._spec.parameters
        if self._spec.method == "grid":
            return Chosen(self._next_of_grid())
        if self._spec.method == "study":  # its script chooses; this is one more worker
            return Chosen((("worker", str(number)),))
        memory = ""
        if self._spec.method != "random":
            proposal = ask(self._spec, trials, (seed_of(self._sweep, number), seed_of(self._sweep, 0)))
            found = settings(space, proposal.place)
            if found not in self._tried:
                return Chosen(found, tuple(proposal.place.items()), proposal.notes)
            memory = proposal.notes_without_point
        return self._any_new(Random(seed_of(self._sweep, number)), memory)

    def _next_of_grid(self) -> Settings:
        size = grid_size(self._spec.parameters) or 0
        for number in range(self._cursor, size):
            self._cursor = number
            if (found := grid_settings(self._spec.parameters, number)) not in self._tried:
                return found
        raise UsedUp

    def _any_new(self, chance: Random, memory: str) -> Chosen:
        space = self._spec.parameters
        for _ in range(_TRIES):
            place = random_place(space, chance)
            if (found := settings(space, place)) not in self._tried:
                return Chosen(found, tuple(place.items()), memory)
        size = grid_size(space)
        if size is None or size > _MOST_LISTED:  # so few are left that they are hard to find, or rounding hides them
            raise UsedUp
        left = [found for number in range(size) if (found := grid_settings(space, number)) not in self._tried]
        if not left:
            raise UsedUp
        found = chance.choice(left)
        return Chosen(found, tuple((place_of(space, found) or {}).items()), memory)


def seed_of(sweep: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{sweep}/{number}".encode()).digest()[:4])
