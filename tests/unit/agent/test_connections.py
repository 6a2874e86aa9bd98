"""Who has to leave when there is no more room for connections, and what is left to the agent."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ugro.kernel.operations.door import DoorLimits, exceeding, leaving

LIMITS = DoorLimits(connections=6, strangers=4)


@dataclass(eq=False)
class Guest:
    peer: str = "127.0.0.1"
    is_known: bool = False
    is_waiting: bool = True


def known(*, is_waiting: bool) -> Guest:
    return Guest(is_known=True, is_waiting=is_waiting)


def test_nobody_leaves_while_there_is_room() -> None:
    assert leaving([Guest(), Guest(), Guest(), known(is_waiting=True)], LIMITS) == []


def test_the_oldest_stranger_leaves_for_the_next_and_nobody_who_is_signed_in() -> None:
    inside = [known(is_waiting=True), *(Guest(is_waiting=False) for _ in range(4))]
    assert leaving(inside, LIMITS) == [inside[1]]


def test_the_address_with_most_strangers_gives_way() -> None:
    inside = [Guest("10.0.0.1"), Guest("10.0.0.2"), Guest("10.0.0.2"), Guest("10.0.0.2")]
    assert leaving(inside, LIMITS) == [inside[1]]


def test_when_all_is_full_an_idle_connection_gives_way_and_none_that_answers() -> None:
    inside = [*(known(is_waiting=False) for _ in range(4)), known(is_waiting=True), known(is_waiting=True)]
    assert leaving(inside, LIMITS) == [inside[4]]
    assert leaving([known(is_waiting=False) for _ in range(6)], LIMITS) is None


def test_where_descriptors_are_few_one_comes_for_another_that_goes() -> None:
    stranger, idle, busy = Guest(), known(is_waiting=True), known(is_waiting=False)
    assert leaving([busy, idle, stranger], LIMITS, is_tight=True) == [stranger]
    assert leaving([busy, idle], LIMITS, is_tight=True) == [idle]
    assert leaving([busy], LIMITS, is_tight=True) is None
    assert leaving([], LIMITS, is_tight=True) is None


@pytest.mark.parametrize(("limit", "free"), [(256, 64), (1024, 256), (65_536, 16_384)])
def test_a_quarter_of_the_descriptors_is_left_to_the_agent(limit: int, free: int) -> None:
    assert LIMITS.free_descriptors(limit) == free


def test_who_has_as_many_as_one_may_have_gives_way_alone() -> None:
    limits = DoorLimits(connections=6, of_one_peer=2, strangers=4)
    busy = Guest("uid 1", is_known=True, is_waiting=False)
    idle = Guest("uid 1", is_known=True)
    other = Guest("uid 2", is_known=True)
    assert leaving([other, busy, idle], limits, "uid 1") == [idle]
    assert leaving([other, busy, busy], limits, "uid 1") is None
    assert leaving([other, busy, busy], limits, "uid 2") == []
    assert leaving([other, busy, busy], LIMITS, "uid 1") == []


def test_a_user_who_has_a_share_gives_up_an_idle_connection_of_their_own_or_gets_no_more() -> None:
    busy, idle = known(is_waiting=False), known(is_waiting=True)
    assert exceeding([busy, idle], 3) == []
    assert exceeding([busy, idle], 2) == [idle]
    assert exceeding([busy, busy], 2) is None
    assert exceeding([busy, busy], None) == []
