"""What is refused as it is submitted, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ugro.features.quotas.model import Limits, Pool, Quotas
from ugro.features.quotas.rules import Ask
from ugro.features.quotas.rules_room import queue_full, refusal
from ugro.kernel.jobs.model import JobSpec

SPEC = JobSpec("job", ("true",))


def told(limits: Limits, *asks: Ask, **spec: object) -> tuple[str, str] | None:
    found = refusal(replace(SPEC, **spec), "ann", asks, Quotas(limits))  # type: ignore[arg-type]
    return None if found is None else (found.text, found.hint)


@pytest.mark.parametrize(
    ("limits", "ask", "text"),
    [
        (Limits(gpus=2), Ask(4, 0, None), "quota gpus of ann: the job needs 4 GPUs, and the most is 2 GPUs"),
        (Limits(gpus=0), Ask(0.25, 0, None), "quota gpus of ann: the job needs 0.2 of a GPU, and the most is 0 GPUs"),
        (Limits(cpus=1), Ask(0, 8, None), "quota cpus of ann: the job needs 8 cores, and the most is 1 core"),
        (
            Limits(gpu_hours_per_day=10),
            Ask(1, 0, None),
            "quota gpu_hours_per_day of ann: without a time limit the job may use 24 GPU-hours, and the most in any 24 "
            "hours is 10 GPU-hours",
        ),
    ],
)
def test_more_than_the_quota_is_refused_with_both_figures(limits: Limits, ask: Ask, text: str) -> None:
    found = told(limits, ask)
    assert found is not None
    assert found[0] == text
    assert found[1].endswith("see: ugro usage")


def test_what_runs_until_it_is_stopped_is_not_told_to_use_a_time_limit() -> None:
    for limits, ask in ((Limits(max_time_limit=3600), Ask(0, 1, None)), (Limits(gpu_hours_per_day=1), Ask(1, 0, None))):
        found = refusal(SPEC, "ann", [ask], Quotas(limits), may_end=False)
        assert found is not None
        assert "--time-limit" not in found.hint


def test_an_alternative_that_fits_is_enough() -> None:
    assert told(Limits(gpus=2), Ask(4, 0, None), Ask(2, 0, None)) is None
    assert told(Limits(gpus=2), Ask(4, 0, None), Ask(0, 1, None)) is None


def test_a_job_longer_than_a_window_fills_it_once() -> None:
    assert told(Limits(gpu_hours_per_day=24), Ask(1, 0, 10 * 86400.0), time_limit_s=10 * 86400.0) is None


def test_the_strictest_of_a_users_limits_and_the_groups_counts() -> None:
    group = Pool("students", Limits(max_priority=10), frozenset({"ann"}), is_group=True)
    found = refusal(SPEC, "ann", [Ask(0, 1, None)], Quotas(Limits(max_priority=90), groups=(group,)))
    assert found is not None
    assert found.text == "quota max_priority of group students: priority 50, and the highest is 10"
    assert refusal(SPEC, "bob", [Ask(0, 1, None)], Quotas(Limits(max_priority=90), groups=(group,))) is None


def test_a_full_queue() -> None:
    pool = Pool("ann", Limits(queued_jobs=3), frozenset({"ann"}))
    assert queue_full([(pool, 2)], 1) is None
    found = queue_full([(pool, 3)], 1)
    assert found is not None
    assert found.text == "quota queued_jobs of ann: 3 jobs of at most 3 already in the queue"
    found = queue_full([(pool, 0)], 4)
    assert found is not None
    assert found.text == "quota queued_jobs of ann: 4 jobs at once, of at most 3"
