"""Rounds of equal time: who computes how much, and that no sample is lost or doubled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.train.rules.shares import Mode
from ugro.train.rules.sync import Ranges, Rounds, Wish, batches, merged, size, take


def informed(paces: list[float], round_s: float = 10.0, batch: int = 8, **more: object) -> Rounds:
    rounds = Rounds(Wish(batch, round_s, **more), len(paces))  # type: ignore[arg-type]
    for rank, pace in enumerate(paces):
        rounds.observe(rank, 1000, 1000 * pace)
    return rounds


def test_the_first_round_is_short_and_equal() -> None:
    plan = Rounds(Wish(8, 20.0), 3).plan(10_000, [True] * 3)
    assert plan.shares == (16, 16, 16)
    assert plan.seconds is None


def test_known_speeds_shape_the_first_round() -> None:
    assert Rounds(Wish(8, 20.0, speeds=(1.0, 0.5)), 2).plan(10_000, [True] * 2).shares == (16, 8)


def test_all_ranks_need_the_same_time() -> None:
    plan = informed([0.001, 0.002, 0.004]).plan(10**7, [True] * 3)
    times = [share * pace for share, pace in zip(plan.shares, (0.001, 0.002, 0.004), strict=True)]
    assert max(times) / min(times) < 1.01
    assert plan.seconds == pytest.approx(max(times), rel=0.02)


def test_rounds_grow_from_short_ones_up_to_the_wish() -> None:
    rounds = Rounds(Wish(8, 20.0), 2)
    rounds.observe(0, 16, 0.1)
    rounds.observe(1, 16, 0.1)
    seconds = [rounds.plan(10**8, [True] * 2).seconds for _ in range(6)]
    assert seconds == [pytest.approx(one, rel=0.01) for one in (0.4, 1.6, 6.4, 20, 20, 20)]


def test_a_rank_that_became_slower_gets_less_in_the_next_round() -> None:
    rounds = informed([0.001, 0.001])
    rounds.observe(1, 1000, 4.0)
    before, after = rounds.plan(10**7, [True] * 2).shares
    assert before / after == pytest.approx(4, rel=0.02)


def test_small_changes_are_smoothed() -> None:
    rounds = informed([0.001])
    rounds.observe(0, 1000, 1.1)
    assert rounds.pace == [pytest.approx(0.00105)]


def test_a_step_longer_than_a_round_is_made_smaller() -> None:
    plan = informed([0.001, 2.0], round_s=10.0, batch=100).plan(10**7, [True] * 2)
    assert plan.shares[1] in (4, 5)  # rounds are equal parts of an epoch


@pytest.mark.parametrize(("mode", "shares"), [(Mode.OFF, 1.0), (Mode.STATIC, 2.0), (Mode.ADAPTIVE, 4.0)])
def test_shares_follow_the_balance_mode(mode: Mode, shares: float) -> None:
    plan = informed([0.001, 0.004], mode=mode, speeds=(1.0, 0.5)).plan(10**7, [True] * 2)
    assert plan.shares[0] / plan.shares[1] == pytest.approx(shares, rel=0.02)


def test_a_busy_rank_gets_nothing() -> None:
    assert informed([0.001] * 3).plan(10**6, [True, False, True]).shares[1] == 0


def test_the_owner_of_a_machine_leaves_it_less_and_the_others_the_rest() -> None:
    rounds = informed([0.001, 0.001], round_s=1.0)
    whole = rounds.plan(10**6, [True] * 2).total
    rounds.observe(1, 1000, 1.0, part=0.2)
    plan = rounds.plan(10**6, [True] * 2)
    assert plan.shares[1] <= 0.2 * plan.total / 2
    assert plan.total == pytest.approx(whole, rel=0.01)


def test_with_batch_norm_nobody_gets_too_few_samples_of_the_rest() -> None:
    plan = informed([0.001, 0.002, 0.004], least=8).plan(10, [True] * 3)
    assert plan.shares == (10, 0, 0)


def test_what_is_known_survives_a_checkpoint_with_as_many_ranks() -> None:
    rounds = informed([0.001, 0.002])
    again, other = Rounds(rounds.wish, 2), Rounds(rounds.wish, 3)
    again.restore(rounds.state())
    other.restore(rounds.state())
    assert again.plan(10**6, [True] * 2) == rounds.plan(10**6, [True] * 2)
    assert other.pace == [None] * 3


@given(
    st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=6),
    st.integers(1, 50_000),
    st.integers(1, 64),
    st.integers(1, 8),
    st.data(),
)
def test_an_epoch_is_computed_once_however_rounds_end(
    paces: list[float], samples: int, batch: int, least: int, data: st.DataObject
) -> None:
    """Ranks that end their rounds early leave the rest to others; a rank may be late for some rounds."""
    rounds = Rounds(Wish(max(batch, least), 5.0, least), len(paces))
    left: Ranges = ((0, samples),)
    seen: list[tuple[int, int]] = []
    held: list[Ranges] = [()] * len(paces)
    for _ in range(60):
        is_late = [bool(one) and data.draw(st.booleans()) for one in held]
        for rank, share in enumerate(held):
            if is_late[rank]:
                continue
            used = data.draw(st.integers(0, size(share))) if size(share) else 0
            done, rest = take(share, used)
            seen += list(done)
            left, held[rank] = merged((*rest, *left)), ()
            rounds.observe(rank, used, used * paces[rank])
        free = [not one for one in held]
        plan = rounds.plan(size(left), free)
        assert plan.total <= size(left)
        assert all(not share or is_free for share, is_free in zip(plan.shares, free, strict=True))
        for rank, share_size in enumerate(plan.shares):
            if free[rank]:
                held[rank], left = take(left, share_size)
                assert size(held[rank]) == share_size
    seen += [one for share in (*held, left) for one in share]
    assert merged(tuple(seen)) == ((0, samples),)
    assert sum(end - begin for begin, end in seen) == samples


@given(st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=6), st.integers(1, 10_000))
def test_the_last_round_takes_all_and_ends_for_all_at_once(paces: list[float], samples: int) -> None:
    plan = informed(paces, round_s=3000.0).plan(samples, [True] * len(paces))
    if plan.reason != "the rest":
        return
    assert plan.total == samples
    times = [share * pace for share, pace in zip(plan.shares, paces, strict=True)]
    alone = 1 / sum(1 / pace for pace in paces) * samples
    assert max(times) <= alone + max(paces)


def test_steps_of_a_share_are_whole_batches_or_nearly_equal() -> None:
    assert batches(24, 8) == [8, 8, 8]
    assert batches(20, 8) == [7, 7, 6]
    assert batches(0, 8) == []
