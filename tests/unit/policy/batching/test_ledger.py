"""Every item ends in exactly one outcome, whatever is given back, fails, dies or cannot be sent."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.batches.rules import Failed, Ledger, Piece


class World:
    """Answers batches at random; some items fail, kill their process, or cannot be sent."""

    def __init__(self, ledger: Ledger, random: Random, bad: dict[int, str]) -> None:
        self.ledger, self.random, self.bad = ledger, random, bad
        self.slots: dict[int, list[int]] = {slot: [] for slot in range(3)}
        self.results: Counter[int] = Counter()
        self.failures: list[Failed] = []

    def run(self) -> None:
        while not self.ledger.is_finished:
            slot = self.random.choice(list(self.slots))
            if len(self.slots[slot]) < 2 and self.random.random() < 0.6:
                self._send(slot)
            elif self.slots[slot]:
                self._answer(slot)

    def _send(self, slot: int) -> None:
        if self.ledger.next_is_suspect and any(self.slots.values()):
            return self._answer(next(slot for slot, sent in self.slots.items() if sent))
        piece = self.ledger.take(self.random.randint(1, 9))
        if piece is None:
            return None
        batch = self.ledger.sent(piece)
        unsendable = [Failed(i, None, "unsendable") for i in _indices(piece) if self.bad.get(i) == "unsendable"]
        if unsendable:
            self.failures += self.ledger.unsendable(batch, unsendable)
        else:
            self.slots[slot].append(batch)
            if piece.is_suspect:  # nothing follows it
                self._answer(slot)
        return None

    def _answer(self, slot: int) -> None:
        batch = self.slots[slot][0]
        piece = self.ledger.piece(batch)
        if self.random.random() < 0.02:  # the machine
            self.failures += self.ledger.lost(self._all(slot), None, "machine", is_innocent=True)
            return
        done = self.random.randint(1, len(piece.items))
        run = list(_indices(piece))[:done]
        killer = next((index for index in run if self.bad.get(index) == "kills"), None)
        if killer is not None:
            at = killer if self.random.random() < 0.5 else None
            self.failures += self.ledger.lost(self._all(slot), at, "died")
            return
        failed = [index for index in run if self.bad.get(index) == "raises"]
        self.slots[slot].pop(0)
        self.results.update(set(run) - set(failed))
        self.failures += self.ledger.answered(batch, done, [(index, "raised") for index in failed])

    def _all(self, slot: int) -> list[int]:
        sent, self.slots[slot] = self.slots[slot], []
        return sent


def _indices(piece: Piece) -> range:
    return range(piece.start, piece.stop)


@given(
    count=st.integers(0, 60),
    bad=st.dictionaries(st.integers(0, 59), st.sampled_from(["raises", "kills", "unsendable"]), max_size=8),
    seed=st.integers(0, 1 << 32),
    retries=st.integers(0, 2),
    has_length=st.booleans(),
)
def test_every_item_has_one_outcome(
    count: int, bad: dict[int, str], seed: int, retries: int, has_length: bool
) -> None:
    ledger = Ledger(iter(range(1000, 1000 + count)), count if has_length else None, retries)
    world = World(ledger, Random(seed), bad)
    world.run()
    expected_bad = {index for index in bad if index < count}
    assert world.results == Counter(set(range(count)) - expected_bad)
    assert sorted(one.index for one in world.failures) == sorted(expected_bad)
    assert all(one.item in (None, 1000 + one.index) for one in world.failures)
    assert ledger.remaining == 0
    assert ledger.sent_items == 0


def test_what_came_back_goes_before_what_is_new() -> None:
    ledger = Ledger(iter("abcdef"), 6)
    first = _sent(ledger, 3)
    assert ledger.remaining == 3
    ledger.answered(first, 1, [])
    assert ledger.remaining == 5
    again = ledger.take(9)
    assert again == Piece(1, ["b", "c"])


def test_an_item_that_fails_is_tried_again_before_it_is_reported() -> None:
    ledger = Ledger(iter("ab"), 2, retries=1)
    assert ledger.answered(_sent(ledger, 2), 2, [(1, "first")]) == []
    again = _sent(ledger, 2)
    assert ledger.piece(again) == Piece(1, ["b"], failures=1)
    assert ledger.answered(again, 1, [(1, "second")]) == [Failed(1, "b", "second")]
    assert ledger.take(1) is None
    assert ledger.is_finished


def test_retries_of_neighbours_are_one_batch() -> None:
    ledger = Ledger(iter(range(1000)), 1000, retries=1)
    ledger.answered(_sent(ledger, 1000), 1000, [(index, "no") for index in range(1000)])
    assert ledger.piece(_sent(ledger, 1000)) == Piece(0, list(range(1000)), failures=1)


def test_the_item_that_a_process_had_begun_runs_alone_and_the_others_do_not() -> None:
    ledger = Ledger(iter("abcdef"), 6, retries=1)
    assert ledger.lost([_sent(ledger, 4), _sent(ledger, 2)], 2, "died") == []
    pieces = [ledger.take(9) for _ in range(3)]
    assert pieces == [Piece(0, ["a", "b"]), Piece(2, ["c"], deaths=1), Piece(3, ["d", "e", "f"])]
    assert [piece.is_suspect for piece in pieces if piece] == [False, True, False]


def test_the_killer_is_found_by_halves_when_nothing_was_noted() -> None:
    ledger = Ledger(iter(range(1024)), 1024, retries=1)
    deaths, failures = 0, list[Failed]()
    while (piece := ledger.take(1024)) is not None:
        batch = ledger.sent(piece)
        if 700 in piece.items:
            failures += ledger.lost([batch], None, "died")
            deaths += 1
        else:
            ledger.answered(batch, len(piece.items), [])
    assert [one.index for one in failures] == [700]
    assert deaths <= 12


def test_nobody_is_blamed_for_a_lost_machine() -> None:
    ledger = Ledger(iter("ab"), 2, retries=0)
    for _ in range(5):
        assert ledger.lost([_sent(ledger, 2)], None, "gone", is_innocent=True) == []
    assert ledger.take(2) == Piece(0, ["a", "b"], losses=5)


def test_items_that_lose_machine_after_machine_are_found() -> None:
    ledger = Ledger(iter("ab"), 2, retries=0)
    failures: list[Failed] = []
    while (piece := ledger.take(2)) is not None:
        batch = ledger.sent(piece)
        if "b" in piece.items:
            failures += ledger.lost([batch], None, "gone", is_innocent=True)
        else:
            ledger.answered(batch, len(piece.items), [])
    assert [one.index for one in failures] == [1]


def test_what_was_given_up_is_not_sent() -> None:
    ledger = Ledger(iter(range(10**9)), 10**9)
    batch = _sent(ledger, 5)
    assert ledger.give_up() == [batch]
    assert ledger.take(5) is None


@pytest.mark.parametrize("length", [3, None])
def test_an_input_that_is_large_or_slow_is_taken_in_parts(length: int | None) -> None:
    ledger = Ledger(iter("abc"), length)
    assert ledger.take(3, lambda item: item == "b") == Piece(0, ["a", "b"])
    assert ledger.take(3, lambda item: False) == Piece(2, ["c"])
    assert ledger.take(3, lambda item: False) is None
    assert ledger.is_finished


def _sent(ledger: Ledger, count: int) -> int:
    piece = ledger.take(count)
    assert piece is not None
    return ledger.sent(piece)
