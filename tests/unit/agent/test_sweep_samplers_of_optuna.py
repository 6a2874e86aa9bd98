"""The points of a sweep are those that Optuna alone asks for, with the same history: nothing is lost in rows."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import optuna
import pytest

from ugro.features.sweeps.model import Point, Trial, TrialState
from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.service.sampler import Chooser, ask, require, seed_of, worse_than_best
from ugro.kernel.support.errors import NotAllowed

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
SWEEP = 5
PARAMETERS = {
    "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
    "layers": {"min": 1, "max": 40},
    "drop": {"min": 0.0, "max": 0.5},
}
CHOICE = {"opt": {"values": ["adam", "sgd", "lion"]}}
KINDS = {
    "lr": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True),
    "layers": optuna.distributions.IntDistribution(1, 40),
    "drop": optuna.distributions.FloatDistribution(0.0, 0.5),
    "opt": optuna.distributions.CategoricalDistribution(range(3)),
}


def spec_of(method: str, goal: str = "minimize") -> Any:
    parameters = PARAMETERS | (CHOICE if method in ("tpe", "qmc") else {})
    return read({"method": method, "metric": {"name": "loss", "goal": goal}, "parameters": parameters})


def sampler_of(method: str, number: int) -> optuna.samplers.BaseSampler:
    """As a person would write it for such a study."""
    seed = seed_of(SWEEP, number)
    if method == "tpe":
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    if method == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    if method == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed, consider_pruned_trials=True, warn_independent_sampling=False)
    return optuna.samplers.QMCSampler(seed=seed_of(SWEEP, 0), scramble=True, warn_independent_sampling=False)


def loss(place: dict[str, float]) -> float:
    return abs(place["lr"] - 1e-3) * 100 + (place["layers"] - 7) ** 2 / 100 + place["drop"] + place.get("opt", 0.0)


@pytest.mark.parametrize(
    ("method", "count", "goal"),
    [
        ("tpe", 20, "minimize"),
        ("cmaes", 40, "minimize"),
        ("cmaes", 25, "maximize"),
        ("qmc", 20, "minimize"),
        pytest.param("gp", 16, "minimize", marks=pytest.mark.proof),
        pytest.param("tpe", 60, "maximize", marks=pytest.mark.proof),
        pytest.param("cmaes", 120, "minimize", marks=pytest.mark.proof),
    ],
)
def test_rows_lead_to_the_points_of_a_study_that_optuna_keeps_itself(method: str, count: int, goal: str) -> None:
    """Two trials run at any time; some are pruned, one in ten fails. Ours is rebuilt from JSON every time."""
    spec, chance = spec_of(method, goal), Random(3)
    theirs = optuna.create_study(direction=goal)
    rows: list[Trial] = []
    opened: list[tuple[int, optuna.Trial]] = []
    for number in range(1, count + 1):
        theirs.sampler = sampler_of(method, number)
        kinds = {name: kind for name, kind in KINDS.items() if name in {one.name for one in spec.parameters}}
        asked = theirs.ask(kinds)
        ours = ask(spec, rows, (seed_of(SWEEP, number), seed_of(SWEEP, 0)))
        assert ours.place == asked.params, number
        rows.append(Trial(number, (), tuple(ours.place.items()), TrialState.RUNNING, memory=ours.notes))
        opened.append((number, asked))
        if len(opened) > 2:
            done, trial = opened.pop(chance.randrange(len(opened)))
            rows[done - 1] = _ended(rows[done - 1], theirs, trial, chance.random())
    if method in ("cmaes", "qmc"):
        assert any(json.loads(row.memory) for row in rows if row.memory), "the sampler noted something"


def _ended(row: Trial, study: optuna.Study, trial: optuna.Trial, luck: float) -> Trial:
    value = loss(dict(row.asked))
    if luck < 0.1:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return replace(row, state=TrialState.FAILED)
    if luck < 0.3:
        trial.report(value, 1)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        return replace(row, state=TrialState.PRUNED, history=(Point(1, value),), best=value)
    if not isinstance(study.sampler, optuna.samplers.CmaEsSampler):  # which warns that it does not use it
        trial.set_constraint("memory", 0.0)
    study.tell(trial, value)
    return replace(row, state=TrialState.COMPLETE, best=value)


def test_a_random_search_is_spread_as_optunas() -> None:
    """It needs no Optuna, so its points are others; their distribution is the same."""
    from scipy import stats

    spec = spec_of("random")
    chooser = Chooser(SWEEP, spec, [])
    ours = [dict(chooser.choose((), number).asked) for number in range(1, 401)]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    kinds = {name: KINDS[name] for name in PARAMETERS}
    theirs = [study.ask(kinds).params for _ in range(400)]
    for name in PARAMETERS:
        found = stats.ks_2samp([one[name] for one in ours], [one[name] for one in theirs])
        assert found.pvalue > 0.01, name


def test_a_point_that_was_tried_is_replaced_and_the_sampler_goes_on() -> None:
    """Of 12 points, QMC repeats some soon; none is tried twice, and its sequence does not stand still."""
    small = {"a": {"values": [1, 2, 3]}, "b": {"min": 1, "max": 4}}
    spec = read({"method": "qmc", "parameters": small})
    chooser, rows = Chooser(SWEEP, spec, []), list[Trial]()
    for number in range(1, 13):
        chosen = chooser.choose(rows, number)
        rows.append(Trial(number, chosen.settings, chosen.asked, TrialState.COMPLETE, best=1.0, memory=chosen.memory))
        chooser.note(rows[-1])
    assert len({row.settings for row in rows}) == 12
    places = [next(iter(json.loads(row.memory)["study"].values())) for row in rows[1:]]
    assert places == list(range(11))


def test_wilcoxon_ends_what_is_worse_at_the_same_steps_and_nothing_else() -> None:
    tree = {"metric": {"name": "loss"}, "parameters": {"a": {"values": [1, 2, 3, 4]}}, "method": "random"}
    spec = read({**tree, "early_terminate": {"type": "wilcoxon"}})
    assert spec.metric is not None
    assert spec.metric.is_mean

    def trial(number: int, worse: float, state: TrialState, folds: int = 8) -> Trial:
        values = tuple(Point(fold, fold % 3 + worse) for fold in range(folds))
        mean = sum(one.value for one in values) / folds
        return Trial(number, (), (("a", number - 1),), state, best=mean, history=values)

    best, bad = trial(1, 0.0, TrialState.COMPLETE), trial(2, 0.4, TrialState.RUNNING)
    good, young = trial(3, -0.1, TrialState.RUNNING), trial(4, 0.4, TrialState.RUNNING, folds=2)
    assert [one.number for one in worse_than_best(spec, [best, bad, good, young])] == [2]
    assert worse_than_best(spec, [bad, good]) == [], "there is nothing to compare with"


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "cmaes" else found(name))
    with pytest.raises(NotAllowed, match="method cmaes needs cmaes, which is not installed") as missing:
        require("cmaes")
    assert "pip install 'ugro[sweep]'" in (missing.value.hint or "")
