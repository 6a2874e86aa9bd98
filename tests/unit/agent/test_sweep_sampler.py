"""The next point of a sweep: what Optuna's own samplers would choose, and never the same twice."""

from __future__ import annotations

import optuna
import pytest

from ugro.features.sweeps.model import Trial, TrialState
from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.service.sampler import Chooser, UsedUp, ask, importances, seed_of
from ugro.kernel.support.errors import NotAllowed

SPEC = read(
    {
        "method": "bayes",
        "metric": {"name": "loss"},
        "parameters": {
            "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
            "layers": {"min": 1, "max": 20},
            "opt": {"values": ["adam", "sgd", {"name": "lion"}]},
            "epochs": {"value": 3},
        },
    }
)
SMALL = read(
    {
        "method": "bayes",
        "metric": {"name": "loss"},
        "parameters": {"a": {"values": [1, 2, 3]}, "b": {"min": 1, "max": 4}},
    }
)


def made(spec_trials: list[Trial], state: TrialState = TrialState.COMPLETE) -> list[Trial]:
    return [Trial(one.number, one.settings, one.asked, state, best=loss(one)) for one in spec_trials]


def loss(one: Trial) -> float:
    place = dict(one.asked)
    return abs(place["lr"] - 1e-3) * 100 + abs(place["layers"] - 7) / 10 + place["opt"]


def searched(count: int) -> list[Trial]:
    chooser, trials = Chooser(7, SPEC, []), list[Trial]()
    for number in range(1, count + 1):
        chosen = chooser.choose(trials, number)
        trials += made([Trial(number, chosen.settings, chosen.asked)])
        chooser.note(trials[-1])
    return trials


def test_a_study_made_from_rows_asks_what_optunas_own_study_asks() -> None:
    trials = searched(15)
    distributions = {
        "lr": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True),
        "layers": optuna.distributions.IntDistribution(1, 20),
        "opt": optuna.distributions.CategoricalDistribution(range(3)),
    }
    sampler = optuna.samplers.TPESampler(seed=seed_of(7, 16), multivariate=True, constant_liar=True)
    own = optuna.create_study(sampler=sampler)
    for one in trials:
        place = {name: value if name == "lr" else int(value) for name, value in one.asked}
        own.add_trial(optuna.trial.create_trial(value=one.best, params=place, distributions=distributions))
    assert own.ask(distributions).params == ask(SPEC, trials, (seed_of(7, 16), 0)).place


def test_the_same_rows_give_the_same_point_and_a_running_trial_another_one() -> None:
    trials = searched(15)
    first = Chooser(7, SPEC, trials).choose(trials, 16)
    assert Chooser(7, SPEC, trials).choose(trials, 16) == first
    running = [*trials, Trial(16, first.settings, first.asked, TrialState.RUNNING)]
    assert Chooser(7, SPEC, running).choose(running, 17).settings != first.settings


def test_what_does_not_fit_the_memory_is_avoided() -> None:
    """The more layers the better, but no more than ten fit."""

    def tried(number: int, layers: int) -> Trial:
        asked = (("lr", 1e-3), ("layers", float(layers)), ("opt", 0.0))
        if layers > 10:
            return Trial(number, (), asked, TrialState.INFEASIBLE)
        return Trial(number, (), asked, TrialState.COMPLETE, best=1.0 / layers)

    complete = [tried(number, number % 3 + 8) for number in range(1, 13)]
    infeasible = [tried(number, number % 10 + 11) for number in range(13, 33)]

    def too_many(trials: list[Trial]) -> int:
        return sum(ask(SPEC, trials, (seed, 0)).place["layers"] > 10 for seed in range(25))

    assert too_many([*complete, *infeasible]) < too_many(complete) / 2


def test_a_small_space_is_used_up_without_a_point_twice() -> None:
    chooser, trials = Chooser(3, SMALL, []), list[Trial]()
    for number in range(1, 13):
        chosen = chooser.choose(trials, number)
        trials.append(Trial(number, chosen.settings, chosen.asked, TrialState.COMPLETE, best=1.0))
        chooser.note(trials[-1])
    assert len({trial.settings for trial in trials}) == 12
    with pytest.raises(UsedUp):
        chooser.choose(trials, 13)


@pytest.mark.proof
def test_a_large_grid_is_each_point_exactly_once_also_after_a_restart() -> None:
    values = {name: {"values": list(range(size))} for name, size in (("a", 30), ("b", 30), ("c", 25))}
    spec = read({"parameters": values})
    chooser, trials = Chooser(1, spec, []), list[Trial]()
    for number in range(1, 22_501):
        if number == 9000:
            chooser = Chooser(1, spec, trials)
        chosen = chooser.choose((), number)
        trials.append(Trial(number, chosen.settings, chosen.asked, TrialState.COMPLETE))
        chooser.note(trials[-1])
    assert len({trial.settings for trial in trials}) == 22_500
    with pytest.raises(UsedUp):
        chooser.choose((), 22_501)


def test_importances_name_the_parameter_that_matters() -> None:
    trials = [
        Trial(n, (), (("lr", 10 ** -(1 + n % 5)), ("layers", float(n % 20 + 1)), ("opt", n % 3)), TrialState.COMPLETE)
        for n in range(40)
    ]
    found = importances(
        SPEC, [Trial(t.number, (), t.asked, t.state, best=abs(dict(t.asked)["layers"] - 7)) for t in trials]
    )
    assert found[0].parameter == "layers"
    assert sum(one.share for one in found) == pytest.approx(1.0)
    with pytest.raises(NotAllowed, match="4 complete trials; there are 3"):
        importances(SPEC, [Trial(t.number, (), t.asked, t.state, best=1.0) for t in trials[:3]])
