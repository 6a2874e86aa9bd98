"""The next point of a sweep. A grid and a random search need nothing else; Optuna decides for the other methods.

Optuna is imported here, in a thread, when it is first needed. Its study is made from the recorded trials every time:
there is no second state to lose.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from ugro.core.errors import NotAllowed
from ugro.core.sweep import Importance, Settings, Trial, TrialState
from ugro.policy.sweep.space import Kind, Parameter, grid_settings, grid_size, place_of, random_place, settings
from ugro.policy.sweep.spec import Metric, SweepSpec

if TYPE_CHECKING:
    import optuna

_TRIES = 20  # for a point that is new
_MOST_LISTED = 100_000  # points of a small space, among which a new one is searched
_NEEDED = {"bayes": ("optuna",), "tpe": ("optuna",), "gp": ("optuna", "torch", "scipy")}
_MEMORY = "memory"  # a constraint: above 0 it does not fit
_LEAST_EXPLAINED = 4  # complete trials
_importing = threading.Lock()

Asked = tuple[tuple[str, float], ...]


class UsedUp(Exception):
    """Every point of the space was tried."""


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

    def choose(self, trials: Sequence[Trial], number: int) -> tuple[Settings, Asked]:
        """Raises UsedUp. The same trials and the same number give the same point."""
        space = self._spec.parameters
        if self._spec.method == "grid":
            return self._next_of_grid(), ()
        chance = Random(seed_of(self._sweep, number))
        for attempt in range(_TRIES):
            if self._spec.method == "random" or attempt:
                place = random_place(space, chance)
            else:
                place = ask(self._spec, trials, seed_of(self._sweep, number))
            found = settings(space, place)
            if found not in self._tried:
                return found, tuple(place.items())
        return self._any_new(chance)

    def _next_of_grid(self) -> Settings:
        size = grid_size(self._spec.parameters) or 0
        for number in range(self._cursor, size):
            self._cursor = number
            if (found := grid_settings(self._spec.parameters, number)) not in self._tried:
                return found
        raise UsedUp

    def _any_new(self, chance: Random) -> tuple[Settings, Asked]:
        space = self._spec.parameters
        size = grid_size(space)
        if size is None or size > _MOST_LISTED:  # so few are left that they are hard to find, or rounding hides them
            raise UsedUp
        left = [found for number in range(size) if (found := grid_settings(space, number)) not in self._tried]
        if not left:
            raise UsedUp
        found = chance.choice(left)
        return found, tuple((place_of(space, found) or {}).items())


def seed_of(sweep: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{sweep}/{number}".encode()).digest()[:4])


def require(method: str) -> None:
    """Raises NotAllowed if a package is missing."""
    for name in _NEEDED.get(method, ()):
        if importlib.util.find_spec(name) is None:
            package = "'ugro[sweep]'" if name == "optuna" else name
            hint = f"on this machine: pip install {package}, then ugro agent restart; without it: grid or random"
            raise NotAllowed(f"method {method} needs {name}, which is not installed", hint=hint)


def ask(spec: SweepSpec, trials: Sequence[Trial], seed: int) -> dict[str, float]:
    """What Optuna proposes, having seen these trials."""
    study = study_of(spec, trials, _sampler(spec.method, seed))
    return {name: float(place) for name, place in study.ask(_distributions(spec.parameters)).params.items()}


def importances(spec: SweepSpec, trials: Sequence[Trial]) -> tuple[Importance, ...]:
    """How much of the differences each parameter explains, the most first. Raises NotAllowed."""
    require("tpe")
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE and trial.best is not None]
    if spec.metric is None or len(complete) < _LEAST_EXPLAINED:
        raise NotAllowed(
            f"importances need a metric and {_LEAST_EXPLAINED} complete trials; there are {len(complete)}",
            hint="let more trials end",
        )
    study = study_of(spec, complete, _sampler("tpe", 0))
    if len(_distributions(spec.parameters)) == 1:
        return tuple(Importance(name, 1.0) for name in _distributions(spec.parameters))
    evaluator = _optuna().importance.PedAnovaImportanceEvaluator()
    found = _optuna().importance.get_param_importances(study, evaluator=evaluator)
    return tuple(Importance(name, float(share)) for name, share in found.items())


def study_of(spec: SweepSpec, trials: Sequence[Trial], sampler: Any) -> optuna.Study:
    optuna = _optuna()
    study = optuna.create_study(sampler=sampler, direction=spec.goal)
    worst = _worst(spec.metric, trials)
    frozen = [_frozen(spec, trial, worst) for trial in trials]
    study.add_trials([one for one in frozen if one is not None])
    return study


def _frozen(spec: SweepSpec, trial: Trial, worst: float) -> optuna.trial.FrozenTrial | None:
    """None: nothing can be learned from it."""
    optuna, known = _optuna(), dict(trial.asked) or place_of(spec.parameters, trial.settings) or {}
    kinds = _distributions(spec.parameters)
    place = {name: known[name] if _is_number(spec, name) else int(known[name]) for name in kinds}
    state = optuna.trial.TrialState
    given: dict[str, Any] = {"params": place, "distributions": kinds}
    steps = {point.step: point.value for point in trial.history}
    if trial.state is TrialState.COMPLETE and trial.best is not None:
        made = optuna.trial.create_trial(value=trial.best, intermediate_values=steps, **given)
        made.set_constraint(_MEMORY, 0.0)
        return made
    if trial.state is TrialState.PRUNED and steps:
        return optuna.trial.create_trial(state=state.PRUNED, intermediate_values=steps, **given)
    if trial.state is TrialState.INFEASIBLE:
        made = optuna.trial.create_trial(value=worst, **given)
        made.set_constraint(_MEMORY, 1.0)
        return made
    if trial.is_open:
        return optuna.trial.create_trial(state=state.RUNNING, **given)
    return None


def _is_number(spec: SweepSpec, name: str) -> bool:
    return next(one for one in spec.parameters if one.name == name).axis.kind is Kind.NUMBER


def _worst(metric: Metric | None, trials: Sequence[Trial]) -> float:
    values = [trial.best for trial in trials if trial.best is not None]
    sign = metric.sign if metric else 1
    return max(values, key=lambda value: sign * value, default=0.0)


def _distributions(space: Sequence[Parameter]) -> dict[str, Any]:
    return {one.name: _distribution(one) for one in space if not one.is_constant}


def _distribution(one: Parameter) -> Any:
    kinds, axis = _optuna().distributions, one.axis
    if axis.kind is Kind.CHOICE:
        return kinds.CategoricalDistribution(range(len(one.values)))
    if axis.kind is Kind.WHOLE:
        return kinds.IntDistribution(int(axis.low), int(axis.high))
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.is_log)


def _sampler(method: str, seed: int) -> Any:
    samplers = _optuna().samplers
    if method == "gp":
        return samplers.GPSampler(seed=seed)
    return samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)


def _optuna() -> Any:
    import warnings

    with _importing:
        import optuna

        if optuna.logging.get_verbosity() != optuna.logging.ERROR:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
