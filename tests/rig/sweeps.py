"""Sweeps with trials of every kind, written into an agent's database before it starts."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

from ugro.features.sweeps.model import Budget, SweepState, Trial, TrialState
from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.rules.spec import random_place, settings
from ugro.features.sweeps.store import NewSweep
from ugro.kernel.store.database import Store
from ugro.kernel.support.state_dir import StateDir

DOCUMENT = {
    "method": "random",
    "metric": {"name": "val/loss"},
    "parameters": {
        "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
        "layers": {"min": 2, "max": 8},
        "dropout": {"min": 0.0, "max": 0.5},
        "optimizer": {"values": ["adam", "sgd", "<i>lion</i>"]},
        "batch_size": {"values": [16, 64, 32]},
    },
}
_ENDS = {7: TrialState.PRUNED, 11: TrialState.FAILED, 13: TrialState.INFEASIBLE}


def make_sweep(home: Path, count: int, name: str = "digits") -> None:
    """Its best trials have an lr near 1e-3, few layers and adam. Every 7th is pruned, every 11th has failed."""

    async def work() -> None:
        store = Store(StateDir(home).database)
        await store.open()
        new = NewSweep(name, name, "ann", json.dumps(DOCUMENT), "{}", Budget(trials=count))
        sweep = await store.sweeps.create(new)
        space = read(DOCUMENT).parameters
        for number in range(1, count + 1):
            place = random_place(space, Random(number))
            trial = await store.sweeps.add(sweep.id, settings(space, place), list(place.items()))
            await store.sweeps.put(sweep.id, _ended(trial))
        await store.sweeps.end(sweep.id, SweepState.DONE, f"all {count} trials were made")
        await store.close()

    asyncio.run(work())


def _ended(trial: Trial) -> Trial:
    values = trial.values
    loss = 0.2 + 0.15 * math.log10(values["lr"] / 1e-3) ** 2 + 0.03 * values["layers"] + values["dropout"] ** 2
    loss += 0.0 if values["optimizer"] == "adam" else 0.2
    state = next((state for every, state in _ENDS.items() if trial.number % every == 0), TrialState.COMPLETE)
    has_value = state in (TrialState.COMPLETE, TrialState.PRUNED)
    best = loss if has_value else None
    return replace(trial, state=state, job=trial.number, best=best, last=best, step=90, took_s=3.0)
