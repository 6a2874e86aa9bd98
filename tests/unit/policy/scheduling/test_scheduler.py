from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ugro.kernel.jobs.model import After, JobSpec, JobState, Launcher, Placement, Resources, Share
from ugro.kernel.jobs.scheduling.model import (
    ClusterView,
    Decision,
    Fail,
    GpuView,
    Holding,
    NodeView,
    Preempt,
    Start,
    Wait,
    Waiting,
)
from ugro.kernel.jobs.scheduling.scheduler import actions, schedule

GIB = 2**30
URGENT, NORMAL, BATCH = 90, 50, 10


def node(name: str, gpus: int = 1, **more: object) -> NodeView:
    views = tuple(GpuView(index, "RTX 4070", 8 * GIB) for index in range(gpus))
    return replace(NodeView(name, 8, 32 * GIB, views), **more)  # type: ignore[arg-type]


def nodes(count: int, gpus: int = 1) -> tuple[NodeView, ...]:
    return tuple(node(f"n{index}", gpus) for index in range(count))


def job(
    number: int, gpus: int = 1, *, on: int = 1, user: str = "ann", at: float | None = None, **spec: object
) -> Waiting:
    made = JobSpec(
        f"job{number}", ("train",), Launcher.DDP,
        resources=Resources(min_nodes=on, max_nodes=on, gpus_per_node=gpus),
    )  # fmt: skip
    return Waiting(number, user, replace(made, **spec), float(number) if at is None else at)  # type: ignore[arg-type]


def holds(number: int, where: str, *gpus: int, user: str = "bob", **more: object) -> Holding:
    shares = tuple(Share(name, gpus or (0,)) for name in where.split())
    made = Holding(number, user, NORMAL, Placement(shares), 0.0, started_at=0.0)
    return replace(made, **more)  # type: ignore[arg-type]


def snapshot(
    nodes: Iterable[NodeView], waiting: Iterable[Waiting], holding: Iterable[Holding] = (), now: float = 100.0,
    ended: dict[int, JobState] | None = None,
) -> ClusterView:  # fmt: skip
    return ClusterView(now, tuple(nodes), tuple(waiting), tuple(holding), ended or {})


def started(decisions: Iterable[Decision]) -> dict[int, tuple[str, ...]]:
    return {one.job: one.placement.nodes for one in decisions if isinstance(one, Start)}


def wait_of(decisions: Iterable[Decision], number: int) -> Wait:
    return next(one for one in decisions if isinstance(one, Wait) and one.job == number)


@pytest.mark.parametrize("ended", [{}, {7: JobState.FAILED}])
def test_what_is_to_be_done_is_the_same_however_far_the_queue_is_looked_at(ended: dict[int, JobState]) -> None:
    """Small commands fill every place of a node; behind them wait others, one of which can only fail."""
    small = [job(number, 0, launcher=Launcher.COMMAND, resources=Resources(cpus=0)) for number in range(10, 310)]
    last = [job(400, after=After(ok=(7,))), job(401, 0), job(402, on=2)]
    seen = snapshot(nodes(2, gpus=0), [*small, *last], ended=ended)
    decisions = schedule(seen)
    assert len(decisions) == 303
    assert actions(seen) == [one for one in decisions if not isinstance(one, Wait)]
    assert len(started(actions(seen))) == 256
    assert (400 in {one.job for one in actions(seen)}) is bool(ended)


def test_a_gang_starts_whole_or_not_at_all() -> None:
    assert started(schedule(snapshot(nodes(3), [job(1, on=3)]))) == {1: ("n0", "n1", "n2")}
    assert started(schedule(snapshot(nodes(3), [job(1, on=3)], [holds(9, "n1")]))) == {}


def test_two_jobs_never_share_a_gpu() -> None:
    decisions = schedule(snapshot(nodes(1, gpus=2), [job(1), job(2), job(3)]))
    given = [one.placement.shares[0].gpus for one in decisions if isinstance(one, Start)]
    assert sorted(given) == [(0,), (1,)]


def test_nodes_that_take_no_work_are_avoided_and_named() -> None:
    drained = node("n0", unusable="is drained: new fans")
    decisions = schedule(snapshot([drained, node("n1")], [job(1), job(2, on=2)]))
    assert started(decisions) == {1: ("n1",)}
    assert "n0 is drained: new fans" in wait_of(decisions, 2).reason


def test_higher_priority_goes_first_then_age() -> None:
    waiting = [job(1, priority=BATCH), job(2), job(3, priority=URGENT), job(4)]
    assert [one.job for one in schedule(snapshot(nodes(1), waiting))] == [3, 2, 4, 1]


def test_whoever_holds_fewer_devices_goes_first_also_within_one_pass() -> None:
    waiting = [*(job(number, user="ann") for number in (1, 2, 3, 4)), job(5, user="bob"), job(6, user="eve")]
    holding = [holds(9, "busy", user="eve")]
    decisions = schedule(snapshot([*nodes(4), node("busy")], waiting, holding))
    assert list(started(decisions)) == [1, 5, 2, 6]


def test_a_sweep_of_one_user_does_not_keep_another_waiting() -> None:
    sweep = [job(number, user="ann", at=0.0) for number in range(4, 101)]
    holding = [holds(1 + index, f"n{index}", user="ann", started_at=3000.0) for index in range(3)]
    late = job(500, user="bob", at=3600.0)
    assert list(started(schedule(snapshot(nodes(4), [*sweep, late], holding, now=3600.0)))) == [500]


def test_a_wait_that_is_over_forgives_nothing_more() -> None:
    sweep = [job(number, user="ann", at=0.0) for number in range(1, 9)]
    late = job(500, user="bob", at=3599.0)
    assert list(started(schedule(snapshot(nodes(4), [*sweep, late], now=3600.0)))) == [1, 500, 2, 3]


def test_what_a_user_was_given_counts_at_every_priority() -> None:
    waiting = [job(1, user="ann", priority=URGENT), job(2, user="ann"), job(3, user="bob")]
    assert [one.job for one in schedule(snapshot(nodes(2), waiting))] == [1, 3, 2]


def test_small_jobs_fill_gaps_that_are_not_kept() -> None:
    holding = [holds(9, "n0")]
    decisions = schedule(snapshot(nodes(3), [job(1, on=2), job(2)], holding))
    assert started(decisions) == {1: ("n1", "n2")}
    decisions = schedule(snapshot(nodes(4), [job(1, on=4), job(2)], holding))
    assert started(decisions) == {}
    waiting = [job(1, on=2), job(2)]
    two_busy = [holds(8, "n0", time_limit_s=200.0), holds(9, "n1", time_limit_s=900.0)]
    decisions = schedule(snapshot(nodes(3), waiting, [*two_busy, holds(7, "n2", started_at=50.0)]))
    assert started(decisions) == {}
    big_node = (*nodes(2), node("n2", gpus=3))
    decisions = schedule(snapshot(big_node, [job(1, on=3), job(2), job(3), job(4)], two_busy))
    assert len(started(decisions)) == 2, "one of the three GPUs of n2 is kept, the others are free to take"


def test_what_ends_in_time_may_use_what_is_kept() -> None:
    holding = [holds(9, "n0", time_limit_s=1000.0)]
    waiting = [job(1, on=2), job(2, time_limit_s=2000.0), job(3, time_limit_s=800.0), job(4)]
    decisions = schedule(snapshot(nodes(2), waiting, holding))
    assert started(decisions) == {3: ("n1",)}
    assert wait_of(decisions, 1).may_start_at == 1000.0
    assert "ends within 13m50s, before job 1 can start" in next(
        one.reason for one in decisions if isinstance(one, Start)
    )
    assert wait_of(decisions, 4).reason == "needs a node with 1 GPU; none is free now"


def test_a_limit_that_ends_with_the_reservation_is_too_late_if_stopping_takes_time() -> None:
    holding = [holds(9, "n0", time_limit_s=1000.0)]
    grace = job(1).spec.stop.grace_s
    just_fits = job(2, time_limit_s=900.0 - grace)
    assert 2 in started(schedule(snapshot(nodes(2), [job(1, on=2), just_fits], holding)))
    too_long = job(2, time_limit_s=901.0 - grace)
    assert started(schedule(snapshot(nodes(2), [job(1, on=2), too_long], holding))) == {}


def test_without_known_ends_nobody_may_use_what_is_kept() -> None:
    decisions = schedule(snapshot(nodes(2), [job(1, on=2), job(2, time_limit_s=1.0)], [holds(9, "n0")]))
    assert started(decisions) == {}
    gang, small = wait_of(decisions, 1), wait_of(decisions, 2)
    assert gang.reason == (
        "needs 2 nodes each with 1 GPU; 1 of 2 are free now; waits for job 9 on n0; "
        "unknown for how long, because job 9 has no time limit"
    )
    assert (gang.blocked_by, gang.may_start_at) == ((9,), None)
    assert small.reason == "needs a node with 1 GPU; that is free on n1, but reserved for job 1"
    assert small.blocked_by == (1,)


def test_a_job_that_waits_for_nodes_out_of_use_keeps_nothing_from_others() -> None:
    away = node("n0", unusable="is unreachable")
    assert started(schedule(snapshot([away, node("n1")], [job(1, on=2), job(2)]))) == {2: ("n1",)}


def test_cores_are_kept_for_later_as_well_as_gpus() -> None:
    wants_cores = Resources(cpus=6)
    holding = [replace(holds(9, "n0"), placement=Placement((Share("n0", (), cpus=4),)))]
    waiting = [job(number, resources=Resources(cpus=cpus)) for number, cpus in ((2, 3), (3, 2), (4, 1), (5, 0))]
    decisions = schedule(snapshot([node("n0")], [job(1, resources=wants_cores), *waiting], holding))
    assert list(started(decisions)) == [3, 5], "of 8 cores, 6 are kept: 2 are left, although 4 are free"


def test_what_is_kept_twice_is_not_promised_a_third_time() -> None:
    def on_two_cores(number: int, limit: float) -> Holding:
        return replace(holds(number, "n0", time_limit_s=limit), placement=Placement((Share("n0", (), cpus=2),)))

    waiting = [job(number, resources=Resources(cpus=2)) for number in (1, 2, 3)]
    decisions = schedule(snapshot([node("n0", cores=4)], waiting, [on_two_cores(8, 200.0), on_two_cores(9, 300.0)]))
    assert [wait_of(decisions, number).may_start_at for number in (1, 2, 3)] == [200.0, 300.0, None]


def test_a_job_waits_for_the_oldest_of_those_without_a_limit_and_for_nobody_in_vain() -> None:
    old, young = holds(9, "n0", 0, 1, started_at=10.0), holds(8, "n0", 2, 3, started_at=20.0)
    needless = replace(holds(7, "n0", time_limit_s=150.0), placement=Placement((Share("n0", (), cpus=1),)))
    decisions = schedule(snapshot(nodes(1, gpus=4), [job(1, 2)], [young, old, needless]))
    assert wait_of(decisions, 1).blocked_by == (9,)


def test_of_the_alternatives_the_one_that_is_free_first_is_waited_for() -> None:
    views = [node("n0", labels=("a",)), node("n1", labels=("b",))]
    ways = Resources(any_of=tuple(Resources(gpus_per_node=1, labels=(label,)) for label in "ab"))
    holding = [holds(8, "n0", time_limit_s=900.0), holds(9, "n1", time_limit_s=500.0)]
    assert wait_of(schedule(snapshot(views, [job(1, resources=ways)], holding)), 1).may_start_at == 500.0
    holding = [holds(8, "n0", time_limit_s=300.0), holds(9, "n1", time_limit_s=500.0)]
    assert wait_of(schedule(snapshot(views, [job(1, resources=ways)], holding)), 1).may_start_at == 300.0


def test_a_job_past_its_limit_is_taken_to_be_gone_soon_not_gone() -> None:
    late = schedule(snapshot(nodes(1), [job(1)], [holds(9, "n0", time_limit_s=50.0)]))
    assert wait_of(late, 1).may_start_at == 130.0


def test_a_job_waits_for_those_it_comes_after() -> None:
    waiting = [job(5, after=After(ok=(1,), any=(2,)))]
    cluster = nodes(1)
    assert wait_of(schedule(snapshot(cluster, waiting)), 5).blocked_by == (1, 2)
    done = {1: JobState.SUCCEEDED, 2: JobState.FAILED}
    assert started(schedule(snapshot(cluster, waiting, ended=done))) == {5: ("n0",)}
    for state in (JobState.FAILED, JobState.CANCELLED):
        decision = schedule(snapshot(cluster, waiting, ended={1: state}))
        assert decision == [Fail(5, f"it requires that job 1 succeeds, and job 1 ended as {state}")]


def test_between_attempts_it_pauses_and_what_it_came_after_no_longer_counts() -> None:
    again = replace(job(1, after=After(ok=(7,))), state=JobState.RECOVERING, attempt=2, not_before=130.0)
    assert schedule(snapshot(nodes(1), [again])) == [Wait(1, "waits 30.0 s before attempt 3", (), 130.0)]
    assert started(schedule(snapshot(nodes(1), [again], now=130.0))) == {1: ("n0",)}


def test_an_urgent_job_ends_the_fewest_and_youngest_preemptible_ones() -> None:
    def batch(number: int, where: str, *gpus: int, at: float) -> Holding:
        return holds(number, where, *gpus, priority=BATCH, is_preemptible=True, started_at=at)

    old, young = batch(1, "n0", at=10.0), batch(2, "n1", at=90.0)
    decisions = schedule(snapshot(nodes(2), [job(9, priority=URGENT)], [old, young]))
    assert [one for one in decisions if isinstance(one, Preempt)] == [
        Preempt(2, 9, "stopped for job 9 of priority 90; it is preemptible and has priority 10")
    ]
    assert wait_of(decisions, 9).may_start_at == 130.0
    pair, singles = batch(3, "n0", 0, 1, at=10.0), [batch(4, "n1", 0, at=80.0), batch(5, "n1", 1, at=90.0)]
    decisions = schedule(snapshot(nodes(2, gpus=2), [job(9, 2, priority=URGENT)], [pair, *singles]))
    assert [one.job for one in decisions if isinstance(one, Preempt)] == [3]
    beside = batch(3, "n1", 2, 3, at=10.0)
    decisions = schedule(snapshot([node("n1", 4)], [job(9, 2, priority=URGENT)], [beside, *singles]))
    assert [one.job for one in decisions if isinstance(one, Preempt)] == [3]


def test_a_victim_that_another_makes_needless_is_spared() -> None:
    young = holds(1, "n0", 0, priority=BATCH, is_preemptible=True, started_at=90.0)
    wide = replace(
        holds(2, "n0", priority=BATCH, is_preemptible=True, started_at=10.0),
        placement=Placement((Share("n0", (1,)), Share("n1", (0,)))),
    )
    decisions = schedule(snapshot([node("n0", 2), node("n1")], [job(9, on=2, priority=URGENT)], [young, wide]))
    assert [one.job for one in decisions if isinstance(one, Preempt)] == [2]


@pytest.mark.parametrize(
    "victim",
    [
        holds(1, "n0", priority=URGENT, is_preemptible=True),
        holds(1, "n0", priority=BATCH),
        holds(1, "n0", priority=BATCH, is_preemptible=True, is_stopping=True),
        holds(1, "n0", priority=BATCH, is_preemptible=True, time_limit_s=110.0),
    ],
)
def test_equals_the_unwilling_and_those_that_end_anyway_are_not_ended(victim: Holding) -> None:
    decisions = schedule(snapshot(nodes(1), [job(9, priority=URGENT)], [victim]))
    assert [type(one) for one in decisions] == [Wait]


def test_nobody_is_ended_in_vain() -> None:
    batch = holds(1, "n0", priority=BATCH, is_preemptible=True)
    decisions = schedule(snapshot(nodes(2), [job(9, on=2, priority=URGENT)], [batch, holds(2, "n1")]))
    assert [type(one) for one in decisions] == [Wait]


def test_nobody_is_ended_for_devices_that_are_promised_to_another() -> None:
    batch = holds(1, "n0", priority=BATCH, is_preemptible=True)
    waiting = [job(8, on=2), job(9, priority=NORMAL - 10)]
    decisions = schedule(snapshot(nodes(3), waiting, [batch, holds(2, "n1"), holds(3, "n2", started_at=99.0)]))
    assert [type(one) for one in decisions] == [Wait, Wait]
    assert wait_of(decisions, 8).blocked_by == (1, 2)


def test_what_was_freed_for_an_urgent_job_is_not_taken_by_others() -> None:
    waiting = [job(8, on=2, priority=URGENT), job(9)]
    stopping = holds(0, "n0", priority=BATCH, is_preemptible=True, is_stopping=True)
    batch = holds(1, "n1", priority=BATCH, is_preemptible=True)
    decisions = schedule(snapshot(nodes(3), waiting, [stopping, batch, holds(2, "n2")]))
    assert [one.job for one in decisions if isinstance(one, Preempt)] == [1]
    later = schedule(snapshot(nodes(3), waiting, [replace(batch, is_stopping=True), holds(2, "n2")]))
    assert [type(one) for one in later] == [Wait, Wait]
