"""Quotas in the scheduler: what waits, for what and until when, and whom it does not hold up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from tests.unit.policy.scheduling.test_scheduler import (
    BATCH,
    NORMAL,
    URGENT,
    holds,
    job,
    node,
    nodes,
    snapshot,
    started,
    wait_of,
)
from ugro.features.quotas.model import DAY_S, HOUR_S, Limits, Pool, Quotas
from ugro.features.quotas.rules import Accounts, HourUse
from ugro.kernel.jobs.model import ALL_GPUS, Placement, Resources, Share, Sharing
from ugro.kernel.jobs.scheduling.model import ClusterView, Holding, NodeView, Preempt, Waiting
from ugro.kernel.jobs.scheduling.scheduler import Explanation, actions, schedule
from ugro.kernel.jobs.scheduling.why import why


def limited(
    quotas: Quotas,
    where: Iterable[NodeView],
    waiting: Iterable[Waiting],
    holding: Iterable[Holding] = (),
    *,
    now: float = 100.0,
    hours: Mapping[str, tuple[HourUse, ...]] | None = None,
) -> ClusterView:
    return replace(snapshot(where, waiting, holding, now), accounts=Accounts(quotas, hours=hours or {}))


def of_all(**limits: float) -> Quotas:
    return Quotas(Limits(**limits))  # type: ignore[arg-type]


def group(*members: str, **limits: float) -> Quotas:
    return Quotas(groups=(Pool("students", Limits(**limits), frozenset(members), is_group=True),))  # type: ignore[arg-type]


def test_a_job_above_the_quota_waits_and_holds_nobody_up() -> None:
    waiting = [job(number) for number in (1, 2, 3)] + [job(9, user="bob")]
    seen = limited(of_all(gpus=2), nodes(4), waiting)
    assert set(started(schedule(seen))) == {1, 2, 9}
    wait = wait_of(schedule(seen), 3)
    assert wait.quota == "quota gpus of ann"
    assert wait.reason == (
        "quota gpus of ann: 2 of 2 GPUs are in use, and the job needs 1; "
        "unknown for how long, because job 1 has no time limit"
    )
    assert wait.may_start_at is None


def test_it_says_until_when_the_running_jobs_take_the_quota() -> None:
    holding = [holds(8, "n0", user="ann", time_limit_s=700.0), holds(9, "n1", user="ann", time_limit_s=400.0)]
    seen = limited(of_all(gpus=2), nodes(4), [job(1), job(2, on=2)], holding)
    assert wait_of(schedule(seen), 1).quota_until == 400.0
    assert "waits for job 9, for 5m at most" in wait_of(schedule(seen), 1).reason
    assert wait_of(schedule(seen), 2).quota_until == 700.0
    assert wait_of(schedule(seen), 2).blocked_by == (9, 8)
    found = why(seen, 1)
    assert found.quota == "quota gpus of ann"
    assert found.quota_until == 400.0
    assert found.may_start_at is None
    assert found.details[-1] == "then it starts as soon as devices are free"


def test_a_job_over_quota_neither_reserves_nor_stops_others() -> None:
    holding = [holds(9, "n0", user="ann"), holds(8, "n1", user="bob", priority=BATCH, is_preemptible=True)]
    urgent = job(1, priority=URGENT)
    batch = job(2, user="eve", priority=BATCH)
    decisions = schedule(limited(of_all(gpus=1), nodes(2), [urgent, batch], holding))
    assert not [one for one in decisions if isinstance(one, Preempt)]
    assert "reserved" not in wait_of(decisions, 2).reason
    freed = limited(of_all(gpus=1), nodes(2), [urgent, batch], holding[:1])
    assert set(started(schedule(freed))) == {2}, "the free device is not kept for the job over quota"


def test_a_group_counts_all_its_members_together() -> None:
    quotas = group("ann", "bob", gpus=3)
    waiting = [job(1, user="ann"), job(2, user="bob"), job(3, user="ann"), job(4, user="bob"), job(5, user="eve")]
    seen = limited(quotas, nodes(6), waiting)
    assert set(started(schedule(seen))) == {1, 2, 3, 5}
    assert wait_of(schedule(seen), 4).quota == "quota gpus of group students"


def test_cores_count_only_for_jobs_without_gpus() -> None:
    seen = limited(of_all(cpus=2), nodes(4, gpus=1), [job(1, 0), job(2, 0), job(3, 0), job(4, 1)])
    assert set(started(schedule(seen))) == {1, 2, 4}
    assert "2 of 2 cores are in use" in wait_of(schedule(seen), 3).reason


def test_all_gpus_of_a_node_are_those_that_the_quota_leaves() -> None:
    wants_all = job(1, ALL_GPUS)
    [start] = actions(limited(of_all(gpus=3), nodes(1, gpus=8), [wants_all]))
    assert [len(share.gpus) for share in start.placement.shares] == [3]  # type: ignore[union-attr]


def test_a_job_on_two_to_four_nodes_gets_as_many_as_the_quota_leaves() -> None:
    flexible = job(1, resources=Resources(min_nodes=2, max_nodes=4, gpus_per_node=1))
    [start] = actions(limited(of_all(gpus=3), nodes(4), [flexible]))
    assert len(start.placement.nodes) == 3  # type: ignore[union-attr]


def test_jobs_that_share_a_gpu_count_as_parts_of_it() -> None:
    shared = Resources(gpus_per_node=1, sharing=Sharing("sweep", 4))
    waiting = [job(number, resources=shared) for number in range(1, 7)]
    seen = limited(of_all(gpus=1), nodes(3), waiting)
    assert len(started(schedule(seen))) == 4
    holding = Holding(9, "ann", NORMAL, Placement((Share("n0", (0,), gpu_group="sweep"),)), 0.0, 0.0, gpu_part=0.25)
    assert len(started(schedule(limited(of_all(gpus=1), nodes(3), waiting, [holding])))) == 3


@pytest.mark.parametrize(("limit_h", "starts"), [(3.0, 3), (2.5, 2)])
def test_gpu_hours_are_kept_for_the_time_limits_of_jobs(limit_h: float, starts: int) -> None:
    grace_s = job(1).spec.stop.grace_s
    waiting = [job(number, time_limit_s=HOUR_S - grace_s) for number in range(1, 6)]
    seen = limited(of_all(gpu_hours_per_day=limit_h), nodes(5), waiting)
    assert len(started(schedule(seen))) == starts


def test_used_gpu_hours_are_free_again_when_they_are_a_day_old() -> None:
    now = 10 * DAY_S
    past = {"ann": (HourUse(now - 23 * HOUR_S, 2 * HOUR_S), HourUse(now - 2 * HOUR_S, 5 * HOUR_S))}
    small = job(1, time_limit_s=2 * HOUR_S - 30.0)
    seen = limited(of_all(gpu_hours_per_day=8), nodes(1), [small], now=now, hours=past)
    wait = wait_of(schedule(seen), 1)
    assert "7 of 8 GPU-hours of the last 24 hours are used or kept for running jobs" in wait.reason
    assert wait.quota_until == now + HOUR_S
    later = limited(of_all(gpu_hours_per_day=8), nodes(1), [small], now=now + HOUR_S, hours=past)
    assert set(started(schedule(later))) == {1}


def test_a_job_above_the_gpu_hours_of_a_week_waits_and_why_names_the_quota() -> None:
    now = 10 * DAY_S
    past = {"ann": (HourUse(now - 6 * DAY_S, 6 * HOUR_S), HourUse(now - 2 * DAY_S, 10 * HOUR_S))}
    quotas = of_all(gpu_hours_per_day=8, gpu_hours_per_week=20)
    small = job(1, time_limit_s=5 * HOUR_S - 30.0)
    seen = limited(quotas, nodes(1), [small, job(2, user="bob", time_limit_s=60.0)], now=now, hours=past)
    assert set(started(schedule(seen))) == {2}
    found = why(seen, 1)
    assert found.quota == "quota gpu_hours_per_week of ann"
    assert found.text == (
        "quota gpu_hours_per_week of ann: 16 of 20 GPU-hours of the last 7 days are used or kept for running jobs, "
        "and the job may use 5; waits for 1d at most"
    )
    assert found.quota_until == now + DAY_S
    later = limited(quotas, nodes(1), [small], now=now + DAY_S, hours=past)
    assert set(started(schedule(later))) == {1}


def test_a_running_job_without_a_time_limit_counts_for_the_whole_window() -> None:
    holding = [holds(9, "n0", user="ann")]
    seen = limited(of_all(gpu_hours_per_day=24), nodes(3), [job(1, time_limit_s=60.0)], holding)
    wait = wait_of(schedule(seen), 1)
    assert wait.quota == "quota gpu_hours_per_day of ann"
    assert "job 9 has no time limit" in wait.reason


def test_what_the_quota_can_never_give_says_so_and_holds_nobody_back() -> None:
    """The quota was lowered after the job was submitted."""
    waiting = [job(1, on=3, at=0.0), job(2)]
    seen = limited(of_all(gpus=2), nodes(4), waiting, now=100_000.0)
    assert set(started(schedule(seen))) == {2}
    assert wait_of(schedule(seen), 1).reason == (
        "quota gpus of ann: the job needs 3 GPUs, and the most is 2 GPUs; it starts only if the quota is raised"
    )


def test_after_an_hour_a_large_job_comes_before_small_ones_of_the_same_quota() -> None:
    holding = [holds(9, "n0", user="ann")]
    waiting = [job(1, on=3, at=0.0), job(2, at=1.0), job(3, user="bob", at=2.0)]
    early = limited(of_all(gpus=3), nodes(6), waiting, holding, now=3000.0)
    assert set(started(schedule(early))) == {2, 3}
    late = limited(of_all(gpus=3), nodes(6), waiting, holding, now=4000.0)
    assert set(started(schedule(late))) == {3}
    assert "the rest is left for job 1, which comes first" in wait_of(schedule(late), 2).reason


def test_small_jobs_do_not_take_the_quota_of_one_that_waits_for_devices() -> None:
    """Devices are reserved for job 1, from when job 9 has ended. Those who end before may use its quota until then."""
    holding = [holds(9, "n0", user="bob", time_limit_s=1000.0)]
    waiting = [job(1, on=2), job(2, time_limit_s=100.0), job(3), job(4, user="eve")]
    labelled = [*nodes(2), node("n2", labels=("x",)), node("n3", labels=("x",))]
    large = replace(waiting[0], spec=replace(waiting[0].spec, resources=Resources(2, 2, 1, only=("n0", "n1"))))
    seen = limited(of_all(gpus=2), labelled, [large, *waiting[1:]], holding)
    decisions = schedule(seen)
    assert set(started(decisions)) == {2, 4}
    assert "left for job 1" in wait_of(decisions, 3).reason


def test_every_explanation_is_that_of_the_whole_pass() -> None:
    waiting = [job(number, user=user) for number, user in enumerate("aaaabbbbcccc", start=1)]
    seen = limited(Quotas(Limits(gpus=2), {"b": Limits()}), nodes(6), waiting)
    decisions = schedule(seen)
    explained = Explanation(seen)
    for decision in decisions:
        found = explained.of(decision.job)
        assert found is not None
        assert type(found) is type(decision)
    assert actions(seen) == [one for one in decisions if one.job in started(decisions)]
