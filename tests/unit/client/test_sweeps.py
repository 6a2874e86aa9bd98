from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ugro.client.client import Client
from ugro.client.reach import OwnAgent, OwnWish
from ugro.features.sweeps.client import extended
from ugro.features.sweeps.model import Budget, SweepReport, SweepState, Trial, TrialState
from ugro.features.sweeps.operations import LaunchBestOfSweep, LaunchedBest, ResumeSweep
from ugro.kernel.jobs.model import Job, JobSpec, JobState
from ugro.kernel.support.codec import dumps
from ugro.kernel.support.state_dir import StateDir

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
def test_more_trials_are_beyond_those_that_were_made_or_allowed(
    states: str, allowed: int | None, wanted: int, tmp_path: Path
) -> None:
    """What was stopped is made again, and counts for nothing."""
    trials = tuple(
        Trial(number, (), state=TrialState(state)) for number, state in enumerate(states.split(), start=1)
    )
    found = json.loads(dumps(replace(REPORT, trials=trials, budget=Budget(trials=allowed))))

    class Asked(OwnAgent):
        def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = 60.0) -> Any:
            return {"sweep": found}

    client = Client.through(Asked(StateDir(tmp_path), OwnWish()))
    assert extended(client, "s", more_trials=5) == ResumeSweep("7", wanted)


def test_the_audit_log_says_which_job_the_best_settings_became() -> None:
    job = Job(9, JobSpec("s-best", ("x",)), "ann", JobState.QUEUED, "", "")
    asked = LaunchBestOfSweep("s", "ann", "k")
    assert asked.operation.audit == "launch best of sweep {word}"
    assert asked.about(LaunchedBest(job)) == "s → 9"
