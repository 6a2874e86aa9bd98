"""Messages between a pool and its hosts: once and in order, wherever the connection is cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.batches.pipes import Kind, Session


@given(st.integers(0, 2**32))
def test_every_message_arrives_once_and_in_order_over_any_number_of_cuts(seed: int) -> None:
    chance = random.Random(seed)
    ours, theirs = Session(), Session()
    under_way: list[list[bytes]] = []
    arrived: list[bytes] = []
    for number in range(50):
        under_way.append(ours.message(Kind.BATCH, number, [b"%d" % number]))
        for _ in range(chance.randint(0, len(under_way))):
            if (message := theirs.read(under_way.pop(0))) is not None:
                arrived.append(message.parts[0])
        if chance.random() < 0.3:  # a cut: what is under way is lost
            under_way = ours.again(theirs.received)
        if chance.random() < 0.3:
            ours.read(theirs.message(Kind.RECEIVED))
    for frame in ours.again(theirs.received):
        if (message := theirs.read(frame)) is not None:
            arrived.append(message.parts[0])
    assert arrived == [b"%d" % number for number in range(50)]


def test_what_has_arrived_is_not_kept() -> None:
    ours, theirs = Session(), Session()
    for _ in range(10):
        theirs.read(ours.message(Kind.BATCH, 1, [b"x"]))
    assert len(ours.again(0)) == 10
    ours.read(theirs.message(Kind.ANSWER, 1))
    assert ours.again(0) == []


def test_a_message_that_is_missing_is_noticed() -> None:
    ours, theirs = Session(), Session()
    ours.message(Kind.BATCH)
    with pytest.raises(ValueError, match="message 2 after 0"):
        theirs.read(ours.message(Kind.BATCH))
