"""When a trial has seen enough."""

from __future__ import annotations

from ugro.train.trial import Wish


def test_a_joint_trial_goes_on_until_it_has_seen_enough_steps_with_its_last_shares() -> None:
    wish = Wish(is_joint=True, parts=3, limit_s=30)
    assert not wish.is_met(steps=40, settled_steps=11, elapsed_s=20)
    assert wish.is_met(steps=40, settled_steps=12, elapsed_s=20)


def test_a_trial_alone_has_no_shares_to_find() -> None:
    wish = Wish(is_joint=False, parts=3, limit_s=30)
    assert not wish.is_met(steps=15, settled_steps=15, elapsed_s=20)
    assert wish.is_met(steps=16, settled_steps=0, elapsed_s=20)


def test_no_trial_ends_before_a_third_of_its_time_or_after_all_of_it() -> None:
    for is_joint in (True, False):
        wish = Wish(is_joint, parts=3, limit_s=30)
        assert not wish.is_met(steps=900, settled_steps=900, elapsed_s=9.9)
        assert wish.is_met(steps=1, settled_steps=0, elapsed_s=30)
