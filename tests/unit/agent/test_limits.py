"""What of a job's demand is sent to a node as a limit."""

from __future__ import annotations

from typing import Any

import pytest

from ugro.kernel.jobs.engine.launch import run_start
from ugro.kernel.jobs.model import Job, JobSpec, JobState, Launcher, Placement, Resources, Share
from ugro.kernel.jobs.records import NodePlan, Plan, RankPlan

GIB = 2**30
FOUR, EIGHT, OPEN = Resources(cpus=4), Resources(cpus=8), Resources()


@pytest.mark.parametrize(
    ("wanted", "share", "limits"),
    [
        (Resources(), Share("a", cpus=1), {}),
        (Resources(cpus=0), Share("a"), {}),
        (Resources(cpus=4, memory_bytes=GIB), Share("a", cpus=4, memory_bytes=GIB), {"cpus": 4, "memory_bytes": GIB}),
        (Resources(memory_bytes=GIB), Share("a", cpus=1, memory_bytes=GIB), {"memory_bytes": GIB}),
        (Resources(any_of=(FOUR, EIGHT)), Share("a", cpus=8), {"cpus": 8}),
        (Resources(any_of=(FOUR, OPEN)), Share("a", cpus=1), {}),
    ],
)
def test_only_what_a_job_asked_for_limits_it(wanted: Resources, share: Share, limits: dict[str, Any]) -> None:
    spec = JobSpec("job", ("true",), Launcher.COMMAND, resources=wanted)
    job = Job(1, spec, "me", JobState.STARTING, "", "", attempt=1, placement=Placement((share,)))
    plan = Plan(1, 1, (NodePlan("a", (RankPlan(0, 0, ("true",), ()),), None),), None)
    settings = run_start(job, "a", plan).settings
    assert {key: settings[key] for key in ("cpus", "memory_bytes") if key in settings} == limits
