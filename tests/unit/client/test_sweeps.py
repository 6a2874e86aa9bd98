from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ugro.features.sweeps.client import Sweeps
from ugro.features.sweeps.model import Budget, SweepReport, SweepState, Trial, TrialState
from ugro.kernel.support.codec import dumps

REPORT = SweepReport(
    7, "s", "ann", SweepState.STOPPED, "", "2026-01-01T00:00:00.000+00:00", "random", "loss", "minimize", ("x",),
    Budget(), None, (),
)  # fmt: skip


@pytest.mark.parametrize(
    ("states", "allowed", "wanted"),
    [
        ("complete complete", None, 7),
        ("complete stopped stopped complete", None, 7),
        ("complete stopped", 10, 15),
        ("stopped", 1, 6),
    ],
)
def test_more_trials_are_beyond_those_that_were_made_or_allowed(states: str, allowed: int | None, wanted: int) -> None:
    """What was stopped is made again, and counts for nothing."""
    trials = tuple(
        Trial(number, (), state=TrialState(state)) for number, state in enumerate(states.split(), start=1)
    )
    found = json.loads(dumps(replace(REPORT, trials=trials, budget=Budget(trials=allowed))))
    asked: list[Any] = []

    def ask(method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        asked.append((path, body))
        return {"sweep": found}

    Sweeps(ask, ask).resume("s", more_trials=5)
    assert asked[-1] == ("/v1/sweeps/7/resume", {"trials": wanted, "parallel": None})
