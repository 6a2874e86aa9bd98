"""The balancer on simulated ranks: it converges soon, stays calm in noise, and follows a rank that changes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import Unsatisfiable, UsageError
from ugro.train.rules.balance import Balancer, Batch, Observation, Plan
from ugro.train.rules.shares import Bounds, Cost, Mode, granule_for_gpus, slowest_s, split

NAMES = ("gpu0", "gpu1", "gpu2")
UNEQUAL = (Cost(0.02, 0.0, 0.01), Cost(0.04, 0.0, 0.02), Cost(0.08, 0.0, 0.04))


@dataclass
class Ranks:
    """They take as long as their costs say, and some noise."""

    costs: list[Cost]
    balancer: Balancer
    noise: float = 0.1
    lag: int = 0  # steps that loaders have prepared ahead
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    changes: list[tuple[int, Plan]] = field(default_factory=list)
    pauses: dict[int, dict[int, float]] = field(default_factory=dict)  # seconds that a rank stood still, by step
    step: int = 0

    def run(self, steps: int) -> Ranks:
        for _ in range(steps):
            if plan := self.balancer.observe(self._observe()):
                self.changes.append((self.step, plan))
            self.step += 1
        return self

    def _observe(self) -> Observation:
        shares = self._shares()
        pauses = self.pauses.get(self.step, {})
        seconds = tuple(
            cost.seconds(share) * max(0.3, self.chance.gauss(1, self.noise)) + pauses.get(rank, 0.0)
            for rank, (cost, share) in enumerate(zip(self.costs, shares, strict=True))
        )
        return Observation(shares, seconds, communication_s=0.02)

    def _shares(self) -> tuple[int, ...]:
        if not self.lag:
            return self.balancer.plan.shares
        due = [plan.shares for step, plan in self.changes if step + self.lag < self.step]
        return due[-1] if due else (16, 16, 16)

    @property
    def ideal_s(self) -> float:
        best = split(self.costs, self.balancer.batch.total, [Bounds()] * len(self.costs))
        return slowest_s(self.costs, best)

    @property
    def slowness(self) -> float:
        return slowest_s(self.costs, self.balancer.plan.shares) / self.ideal_s


def ranks(total: int = 48, costs: tuple[Cost, ...] = UNEQUAL, seed: int = 1, **options: float) -> Ranks:
    names = tuple(f"gpu{rank}" for rank in range(len(costs)))
    made = Ranks(list(costs), Balancer(Batch(total, names)), chance=random.Random(seed))
    made.noise = options.get("noise", 0.1)
    made.lag = int(options.get("lag", 0))
    return made


def test_within_eight_steps_a_step_is_nearly_as_short_as_it_can_be() -> None:
    found = [ranks(seed=seed).run(8) for seed in range(40)]
    slowness = sorted(made.slowness for made in found)
    assert slowness[20] < 1.05
    assert slowness[35] < 1.15
    assert slowness[-1] < 1.35
    assert max(made.changes[0][0] for made in found) <= 3


def test_without_noise_eight_steps_lead_to_the_best_split() -> None:
    assert ranks(noise=0.0).run(8).slowness < 1.03


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.002, 0.05)), min_size=2, max_size=6),
    st.integers(0, 1000),
    st.integers(32, 300),
)
def test_any_ranks_end_up_near_the_best_split(parts: list[tuple[float, float]], seed: int, total: int) -> None:
    # The fixed part is at most what 40 samples take: beyond that there is nothing to win by moving some.
    costs = tuple(Cost(40 * ratio * per_sample, 0.0, per_sample) for ratio, per_sample in parts)
    made = ranks(total, costs, seed, noise=0.05).run(120)
    assert made.slowness < 1.2


def test_noise_moves_nothing_once_the_split_is_found() -> None:
    changes = [step for seed in range(10) for step, _ in ranks(seed=seed).run(400).changes if step > 40]
    assert len(changes) <= 36  # of 3,600 steps, and each by little


def test_in_strong_noise_the_split_stays_near_the_best_one() -> None:
    found = []
    for seed in range(40):
        made = ranks(96, seed=seed, noise=0.17).run(12)
        for _ in range(30):
            found.append(made.run(4).slowness)
    assert sum(found) / len(found) < 1.05
    assert sum(one > 1.1 for one in found) < 0.1 * len(found)


def test_equal_ranks_are_left_alone() -> None:
    equal = (Cost(0.02, 0.0, 0.01),) * 3
    changes = [change for seed in range(10) for change in ranks(48, equal, seed, noise=0.05).run(200).changes]
    assert len(changes) <= 5


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("after", [10, 24, 60])
def test_a_halved_rank_is_noticed_within_three_steps(seed: int, after: int) -> None:
    made = ranks(seed=seed).run(after)
    while made.step - made.changes[-1][0] <= 3:  # what a new share takes is known after three steps
        made.run(1)
    made.costs[0] = Cost(0.04, 0.0, 0.02)
    made.changes.clear()
    made.run(3)
    assert [step for step, _ in made.changes], f"nothing happened until step {made.step}"
    assert any("gpu0 takes" in plan.reason for _, plan in made.changes)
    assert made.run(8).slowness < 1.25


def test_a_rank_that_recovers_gets_its_share_back() -> None:
    made = ranks(noise=0.03).run(20)
    before = made.balancer.plan.shares
    made.costs[0] = Cost(0.06, 0.0, 0.03)
    made.run(20)
    made.costs[0] = UNEQUAL[0]
    made.changes.clear()
    made.run(3)
    assert "times as fast as before" in made.changes[0][1].reason
    made.run(40)
    assert abs(made.balancer.plan.shares[0] - before[0]) <= 2


def test_one_slow_step_changes_nothing() -> None:
    made = ranks(noise=0.02).run(30)
    made.changes.clear()
    made.costs[0] = Cost(0.2, 0.0, 0.1)
    made.run(1)
    made.costs[0] = UNEQUAL[0]
    made.run(20)
    assert made.changes == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [(2,), (3,), (2, 3), (2, 3, 4), (3, 4), (15,), (15, 16), (15, 16, 17)])
def test_a_pause_of_some_ranks_makes_no_extreme_split_and_is_soon_forgotten(steps: tuple[int, ...], seed: int) -> None:
    """Two of three equal ranks stood still for seconds: without a limit, the third would get 30 of 32 samples."""
    made = ranks(32, (Cost(0.002, 0.0, 0.005),) * 3, seed, noise=0.05)
    made.pauses = {step: {0: 5.0, 2: 5.0} for step in steps}
    made.run(steps[-1] + 8)
    assert all(min(plan.shares) >= 5 for _, plan in made.changes), made.changes
    assert made.slowness < 1.2, made.changes
    if len(steps) == 1:
        assert not made.changes, "one step says nothing"


@given(st.integers(0, 10_000), st.floats(0.0, 0.6), st.sets(st.integers(0, 60), max_size=6))
def test_no_plan_makes_a_share_more_than_twice_or_half_as_large(seed: int, noise: float, paused: set[int]) -> None:
    made = ranks(seed=seed, noise=noise)
    made.pauses = {step: {seed % 3: 3.0} for step in paused}
    before = made.balancer.plan.shares
    for _, plan in made.run(60).changes:
        for old, new in zip(before, plan.shares, strict=True):
            assert -(-old // 2) <= new <= 2 * old
        before = plan.shares


def test_memory_moves_a_share_as_far_as_it_must() -> None:
    plan = ranks(noise=0.0).run(20).balancer.limit([2, None, None])
    assert plan is not None
    assert plan.shares[0] == 2


@pytest.mark.parametrize(("speeds", "plans"), [((1.0, 0.25), 2), ((1.0, 0.5, 0.25), 2), ((1.0, 0.1), 3)])
def test_real_differences_are_reached_in_a_few_plans_that_follow_soon(speeds: tuple[float, ...], plans: int) -> None:
    costs = tuple(Cost(0.004 / speed, 0.0, 0.004 / speed) for speed in speeds)
    made = ranks(16 * len(speeds), costs, noise=0.02)
    made.run(4 + 3 * (plans - 1))
    assert len(made.changes) == plans
    assert made.changes[0][1].reason.endswith("; more may follow")
    assert made.slowness < 1.1


def test_all_ranks_slowing_down_together_moves_nothing() -> None:
    made = ranks(noise=0.02).run(40)
    made.changes.clear()
    made.costs = [Cost(2 * cost.per_step_s, 0.0, 2 * cost.per_sample_s) for cost in made.costs]
    made.run(30)
    assert made.changes == []


@pytest.mark.parametrize("lag", [2, 4])
def test_a_plan_that_takes_effect_later_is_not_judged_by_the_steps_before(lag: int) -> None:
    made = ranks(noise=0.03, lag=lag).run(60)
    assert made.slowness < 1.1
    assert len(made.changes) <= 6


def test_the_short_batch_at_the_end_of_an_epoch_is_passed_over() -> None:
    made = ranks(noise=0.02).run(30)
    made.changes.clear()
    for _ in range(3):
        made.balancer.observe(Observation((1, 1, 0), (9.0, 9.0, 9.0)))
    made.costs[0] = Cost(0.04, 0.0, 0.02)
    assert made.run(2).changes, "what was usual is still known"


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_the_same_numbers_give_the_same_plans(seed: int, steps: int) -> None:
    one, other = ranks(seed=seed, noise=0.3).run(steps), ranks(seed=seed, noise=0.3).run(steps)
    assert one.changes == other.changes


@given(st.integers(0, 10_000))
def test_every_plan_is_whole_and_has_a_reason(seed: int) -> None:
    for _, plan in ranks(seed=seed, noise=0.4).run(60).changes:
        assert sum(plan.shares) == 48
        assert min(plan.shares) >= 1
        assert plan.reason
        assert plan.predicted_s
        assert plan.predicted_s > 0


def _quiet(mode: Mode, speeds: tuple[float, ...] = ()) -> Iterator[Balancer]:
    made = Ranks(list(UNEQUAL), Balancer(Batch(48, NAMES), mode, speeds))
    made.run(60)
    assert made.changes == []
    yield made.balancer


def test_off_means_equal_shares_whatever_is_measured() -> None:
    for balancer in _quiet(Mode.OFF, (1, 0.5, 0.25)):
        assert balancer.plan.shares == (16, 16, 16)
        assert "off" in balancer.plan.reason


def test_static_shares_follow_the_hardware_report_and_stay() -> None:
    for balancer in _quiet(Mode.STATIC, (1, 0.5, 0.25)):
        assert balancer.plan.shares == (28, 14, 6)


def test_adaptive_begins_with_the_hardware_report() -> None:
    assert Balancer(Batch(48, NAMES), Mode.ADAPTIVE, (1, 0.5, 0.25)).plan.shares == (28, 14, 6)


@pytest.mark.parametrize("mode", Mode)
def test_a_device_that_ran_out_of_memory_gets_no_more_than_it_holds(mode: Mode) -> None:
    made = Ranks(list(UNEQUAL), Balancer(Batch(48, NAMES), mode)).run(20)
    plan = made.balancer.limit([10, None, None])
    assert plan is not None
    assert plan.shares[0] == 10
    assert sum(plan.shares) == 48
    assert plan.reason == "gpu0 can hold 10 samples"
    assert made.balancer.limit([10, None, None]) is None
    made.run(60)
    assert made.balancer.plan.shares[0] <= 10


@pytest.mark.parametrize("mode", Mode)
def test_a_rank_whose_machine_is_used_takes_little_until_it_is_not(mode: Mode) -> None:
    made = Ranks(list(UNEQUAL), Balancer(Batch(48, NAMES), mode)).run(20)
    before = made.balancer.plan.shares
    plan = made.balancer.limit([None] * 3, [0.1, 1.0, 1.0])
    assert plan is not None
    assert plan.shares[0] == 1, "a tenth of a third of 48 samples"
    assert sum(plan.shares) == 48
    assert plan.reason == "the owner uses gpu0"
    assert made.balancer.limit([None] * 3, [0.1, 1.0, 1.0]) is None
    made.run(60)
    assert made.balancer.plan.shares[0] == 1, "what is measured does not change that"
    after = made.balancer.limit([None] * 3, [1.0, 1.0, 1.0])
    assert after is not None
    assert after.reason == "no owner uses a machine any more"
    assert after.shares[0] >= before[0] - 2


def test_if_the_owners_of_all_machines_are_there_the_shares_stay() -> None:
    balancer = Balancer(Batch(48, NAMES))
    assert balancer.limit([None] * 3, [0.1, 0.1, 0.1]) is None
    assert balancer.plan.shares == (16, 16, 16)


@pytest.mark.parametrize("can_accumulate", [False, True])
def test_what_a_small_part_leaves_to_the_others_must_fit_into_their_memory(can_accumulate: bool) -> None:
    balancer = Balancer(Batch(48, NAMES), can_accumulate=can_accumulate)
    balancer.limit([16, 16, 16])
    plan = balancer.limit([16, 16, 16], [0.1, 1.0, 1.0])
    if can_accumulate:
        assert plan is not None
        assert plan.shares[0] == 1
        assert plan.micro_batches == (1, 2, 2)
    else:
        assert plan is None, "nobody could hold the rest"


def test_when_all_devices_together_cannot_hold_the_batch_they_accumulate() -> None:
    balancer = Balancer(Batch(48, NAMES))
    plan = balancer.limit([8, 8, 8])
    assert plan is not None
    assert sum(plan.shares) == 48
    assert plan.micro_batches == tuple(-(-share // 8) for share in plan.shares)


def test_accumulating_is_chosen_where_it_is_faster_than_leaving_the_rest_to_slow_ones() -> None:
    made = ranks(noise=0.0).run(20)
    made.balancer.can_accumulate = True
    plan = made.balancer.limit([14, None, None])
    assert plan is not None
    assert plan.micro_batches[0] == 2
    assert plan.shares[0] > 14


def test_what_was_learned_is_kept_for_the_same_ranks_and_batch() -> None:
    made = ranks().run(40)
    made.balancer.limit([None, None, 20])
    state = json.loads(json.dumps(made.balancer.state()))
    again = Balancer(Batch(48, NAMES))
    assert again.restore(state)
    assert again.plan.shares == made.balancer.plan.shares
    assert again.costs() == made.balancer.costs()
    assert again.caps == [None, None, 20]
    assert not Balancer(Batch(48, NAMES[:2])).restore(state)
    assert not Balancer(Batch(50, NAMES)).restore(state)


def test_the_last_batch_of_an_epoch_is_shared_in_the_same_proportion() -> None:
    plan = ranks().run(20).balancer.plan
    assert sum(plan.share_of(11)) == 11
    assert plan.share_of(1).count(0) == 2
    assert plan.share_of(48) == plan.shares


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Balancer(Batch(2, NAMES)), Unsatisfiable),
        (lambda: Balancer(Batch(48, NAMES), speeds=(1, 1)), UsageError),
        (lambda: Balancer(Batch(48, NAMES), speeds=(1, 1, 0)), UsageError),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Balancer], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_a_group_with_other_members_plans_with_what_was_learnt_of_them() -> None:
    batch = Batch(60, ("fast", "slow", "gone"))
    balancer = Balancer(batch)
    for _ in range(12):
        shares = balancer.plan.shares
        seconds = tuple(share * cost for share, cost in zip(shares, (0.01, 0.02, 0.01), strict=True))
        balancer.observe(Observation(shares, seconds))
    known = balancer.known()
    two = Balancer(Batch(60, ("fast", "slow")))
    two.recall(known)
    assert two.plan.shares == (40, 20)
    three = Balancer(Batch(60, ("fast", "slow", "new")))
    three.recall(known)  # one that nobody knows: equal shares, until it is measured
    assert three.plan.shares == (20, 20, 20)
    equal = Balancer(Batch(60, ("fast", "slow")), Mode.OFF)
    equal.recall(known)
    assert equal.plan.shares == (30, 30)


# --- memory and granules ----------------------------------------------------------------------------------------


def test_a_cap_that_is_estimated_is_said_to_be_one_and_is_not_kept_for_the_next_attempt() -> None:
    balancer = Balancer(Batch(120, NAMES), Mode.ADAPTIVE, speeds=(4, 1, 1))
    plan = balancer.limit([50, None, 30], (), [True, False, False])
    assert plan is not None
    assert plan.reason == "gpu0 has free memory for about 50 samples"
    assert plan.shares[0] == 50
    assert sum(plan.shares) == 120
    assert balancer.state()["caps"] == [None, None, 30]
    assert [balancer.known()[name]["cap"] for name in NAMES] == [None, None, 30]


def test_shares_of_gpus_are_multiples_from_the_first_plan_on_and_the_batch_stays_exact() -> None:
    for total in (256, 250, 97):
        balancer = Balancer(Batch(total, NAMES, granule=8), Mode.ADAPTIVE)
        ranks = Ranks(list(UNEQUAL), balancer).run(60)
        for shares in (balancer.plan.shares, *(plan.shares for _, plan in ranks.changes)):
            assert sum(shares) == total
            assert sum(share % 8 != 0 for share in shares) <= 1, "one takes what is left"
    off = Balancer(Batch(256, NAMES, granule=8), Mode.OFF)
    assert off.plan.shares == (86, 85, 85)


def test_small_batches_have_small_granules() -> None:
    assert [granule_for_gpus(total, 3) for total in (2, 23, 24, 48, 95, 96, 4096)] == [1, 1, 2, 4, 4, 8, 8]
