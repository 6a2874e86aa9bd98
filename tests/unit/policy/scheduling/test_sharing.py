"""GPUs that jobs of one group share: never two strangers on one, and nobody waits longer because of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.scheduling.test_scheduler import holds, job, node, snapshot
from ugro.features.power.model import PowerState
from ugro.kernel.jobs.model import Placement, Resources, Share, Sharing
from ugro.kernel.jobs.scheduling.model import Asleep, ClusterView, Holding, NodeView, Start, Wait, Waiting
from ugro.kernel.jobs.scheduling.scheduler import schedule


def trial(number: int, group: str = "sweep-1", most: int = 2, **more: object) -> Waiting:
    resources = Resources(gpus_per_node=1, sharing=Sharing(group, most))
    return job(number, resources=resources, **more)  # type: ignore[arg-type]


def shares(view: ClusterView) -> dict[int, Share]:
    return {one.job: one.placement.shares[0] for one in schedule(view) if isinstance(one, Start)}


def holds_shared(number: int, where: str, gpu: int, group: str = "sweep-1") -> Holding:
    made = holds(number, where, gpu)
    return replace(made, placement=Placement((replace(made.placement.shares[0], gpu_group=group),)))


def test_trials_fill_a_gpu_before_they_take_the_next() -> None:
    found = shares(snapshot([node("n0", 2)], [trial(number) for number in range(1, 6)]))
    assert [found[number].gpus for number in (1, 2, 3, 4)] == [(1,), (1,), (0,), (0,)]
    assert 5 not in found
    assert {share.gpu_group for share in found.values()} == {"sweep-1"}


def test_others_never_join_a_shared_gpu_and_trials_never_join_others() -> None:
    held = [holds_shared(90, "n0", 0)]
    found = shares(snapshot([node("n0")], [job(1), trial(2, "sweep-2"), trial(3, at=0.5)], held))
    assert set(found) == {3}
    assert shares(snapshot([node("n0")], [trial(1)], [holds(90, "n0", 0)])) == {}


def test_a_gpu_that_somebody_waits_for_is_not_joined() -> None:
    """The other job has waited longer, for a GPU that becomes free when the trial there ends."""
    decisions = schedule(snapshot([node("n0")], [job(1, at=1.0), trial(2, at=2.0)], [holds_shared(90, "n0", 0)]))
    assert all(isinstance(one, Wait) for one in decisions)


def test_cores_memory_and_a_broken_gpu_count_as_for_every_job() -> None:
    held = [holds_shared(90, "n0", 0)]
    wide = replace(trial(1), spec=replace(trial(1).spec, resources=replace(trial(1).spec.resources, cpus=9)))
    assert shares(snapshot([node("n0")], [wide], held)) == {}
    broken = node("n0")
    broken = replace(broken, gpus=(replace(broken.gpus[0], is_broken=True),))
    assert shares(snapshot([broken], [trial(1)], held)) == {}


def test_the_fastest_node_is_joined_first() -> None:
    nodes = [node("slow"), node("fast", speed=2.0)]
    held = [holds_shared(90, "slow", 0), holds_shared(91, "fast", 0)]
    assert shares(snapshot(nodes, [trial(1)], held))[1].node == "fast"


def test_trials_that_will_share_a_gpu_of_a_sleeping_node_wait_until_it_is_awake() -> None:
    asleep = node("n0", asleep=Asleep(PowerState.ASLEEP, 0.0, 60.0, 300.0))
    decisions = schedule(snapshot([asleep], [trial(1), trial(2), trial(3)]))
    assert [one.wakes for one in decisions if isinstance(one, Wait)] == [("n0",), ("n0",), ()]


@given(st.integers(0, 10_000))
def test_whatever_comes_and_goes_a_gpu_has_one_job_or_jobs_of_one_group(seed: int) -> None:
    chance = Random(seed)
    nodes: list[NodeView] = [node(f"n{number}", chance.randint(1, 3)) for number in range(chance.randint(1, 3))]
    groups = ["", "sweep-1", "sweep-2"]
    waiting: list[Waiting] = []
    holding: dict[int, tuple[Holding, Waiting]] = {}
    number = 0
    for _ in range(12):
        for _ in range(chance.randint(0, 4)):
            number += 1
            group = chance.choice(groups)
            waiting.append(trial(number, group, chance.randint(2, 3)) if group else job(number, chance.randint(0, 2)))
        for ended in [one for one in holding if chance.random() < 0.3]:
            del holding[ended]
        view = snapshot(nodes, waiting, [held for held, _ in holding.values()])
        for start in [one for one in schedule(view) if isinstance(one, Start)]:
            [its] = [one for one in waiting if one.id == start.job]
            waiting.remove(its)
            holding[start.job] = (holds(start.job, "", user="ann"), its)
            holding[start.job] = (replace(holding[start.job][0], placement=start.placement), its)
        _expect_no_strangers([held for held, _ in holding.values()], [its for _, its in holding.values()])


def _expect_no_strangers(holding: list[Holding], specs: list[Waiting]) -> None:
    on: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for held, its in zip(holding, specs, strict=True):
        sharing = its.spec.resources.sharing
        for share in held.placement.shares:
            for gpu in share.gpus:
                on[share.node, gpu].append((share.gpu_group, sharing.most if sharing else 1))
    for there in on.values():
        groups = {group for group, _ in there}
        assert len(there) == 1 or (len(groups) == 1 and "" not in groups), on
        assert len(there) <= max(most for _, most in there), on


@pytest.mark.parametrize("long", [90, 91])
def test_the_end_of_the_last_that_shares_it_frees_a_gpu(long: int) -> None:
    held = [
        replace(holds_shared(number, "n0", 0), time_limit_s=500.0 if number == long else 10.0, started_at=100.0)
        for number in (90, 91)
    ]
    [wait] = [one for one in schedule(snapshot([node("n0")], [job(1)], held)) if isinstance(one, Wait)]
    assert wait.may_start_at == 600.0
