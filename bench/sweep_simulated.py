"""Devices of unequal speed without waiting for them: what a search decides, by its own code, and its best value."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

from ugro.features.sweeps.model import Point, Trial, TrialState
from ugro.features.sweeps.rules.decision import best_of, to_prune
from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.service.sampler import Chooser

STEPS = 81
_METRIC = "loss"


class Search(Protocol):
    def suggest(self) -> tuple[int, dict[str, float]]: ...

    def report(self, trial: int, step: int, loss: float) -> set[int]:
        """The trials that end now."""

    def ended(self, trial: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    loss: float
    trials: int


def loss(place: dict[str, float], step: int) -> float:
    """A bowl in three dimensions; where it is steep, a trial also learns more slowly."""
    lr, drop, layers = math.log10(place["lr"]) + 3, place["drop"] - 0.2, place["layers"] - 7
    floor = lr**2 / 4 + 4 * drop**2 + layers**2 / 100
    return float(floor + 0.01 + 2 * step ** -(0.8 / (1 + abs(lr) / 2)))


def best_after(search: Search, speeds: Sequence[float], budget: float) -> Outcome:
    """``budget``: how long all devices work, in steps of a device of speed 1."""
    best, count = math.inf, 0
    events: list[tuple[float, int]] = []  # the end of a step, and the device
    runs: dict[int, tuple[int, dict[str, float], int]] = {}
    for device, speed in enumerate(speeds):
        runs[device] = (*search.suggest(), 0)
        heapq.heappush(events, (1 / speed, device))
    while events:
        now, device = heapq.heappop(events)
        if now > budget:
            break
        trial, place, step = runs[device]
        step += 1
        value = loss(place, step)
        best = min(best, value)
        stopped = search.report(trial, step, value)
        runs[device] = (trial, place, step)
        for other, (number, _, done) in list(runs.items()):
            if number in stopped or (other == device and done >= STEPS):
                search.ended(number)
                count += 1
                runs[other] = (*search.suggest(), 0)
        heapq.heappush(events, (now + 1 / speeds[device], device))
    return Outcome(best, count)


class Ugro:
    def __init__(self, seed: int, *, method: str, prune: dict[str, Any] | None) -> None:
        more = {"early_terminate": prune} if prune else {}
        parameters = {
            "lr": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1.0},
            "drop": {"min": 0.0, "max": 0.9},
            "layers": {"min": 1, "max": 30},
        }
        self._spec = read({"method": method, "metric": {"name": _METRIC}, "parameters": parameters, **more})
        self._trials: dict[int, Trial] = {}
        self._chooser = Chooser(seed + 1000, self._spec, [])

    def suggest(self) -> tuple[int, dict[str, float]]:
        number = len(self._trials) + 1
        chosen = self._chooser.choose(list(self._trials.values()), number)
        trial = Trial(number, chosen.settings, chosen.asked, TrialState.RUNNING, memory=chosen.memory)
        self._trials[number] = trial
        self._chooser.note(trial)
        return number, dict(chosen.asked)

    def report(self, trial: int, step: int, loss: float) -> set[int]:
        known = self._trials[trial]
        history = (*known.history, Point(step, loss))
        self._trials[trial] = replace(known, history=history, best=best_of(history, 1), step=step)
        if self._spec.pruning is None or self._spec.metric is None:
            return set()
        found = to_prune(self._spec.pruning, self._spec.metric, self._trials.values())
        return {one.number for one in found}

    def ended(self, trial: int) -> None:
        known = self._trials[trial]
        is_complete = known.step is not None and known.step >= STEPS
        self._trials[trial] = replace(known, state=TrialState.COMPLETE if is_complete else TrialState.PRUNED)


class RayTune:
    def __init__(self, seed: int) -> None:
        import optuna
        from ray import tune
        from ray.tune.schedulers import ASHAScheduler
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space = {"lr": tune.loguniform(1e-6, 1.0), "drop": tune.uniform(0.0, 0.9), "layers": tune.randint(1, 31)}
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self._search = OptunaSearch(sampler=sampler)
        self._search.set_search_properties(_METRIC, "min", space)
        self._scheduler = ASHAScheduler(
            time_attr="step", metric=_METRIC, mode="min", max_t=STEPS, grace_period=1, reduction_factor=3
        )
        self._trials: dict[int, Any] = {}
        self._last: dict[int, dict[str, Any]] = {}

    def suggest(self) -> tuple[int, dict[str, float]]:
        number = len(self._trials) + 1
        self._trials[number] = SimpleNamespace(trial_id=str(number))
        place = self._search.suggest(str(number))
        self._scheduler.on_trial_add(None, self._trials[number])
        return number, dict(place)

    def report(self, trial: int, step: int, loss: float) -> set[int]:
        result = self._last[trial] = {_METRIC: loss, "step": step, "training_iteration": step}
        self._search.on_trial_result(str(trial), result)
        action = self._scheduler.on_trial_result(None, self._trials[trial], result)
        return {trial} if action == self._scheduler.STOP else set()

    def ended(self, trial: int) -> None:
        self._scheduler.on_trial_complete(None, self._trials[trial], self._last[trial])
        self._search.on_trial_complete(str(trial), self._last[trial])
