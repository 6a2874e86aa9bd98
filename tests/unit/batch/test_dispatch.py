"""The driver of a pool, with an engine that answers late and in any order, and loses slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ugro
from ugro.features.batches.local import LocalEngine
from ugro.features.batches.model import Answered, Event, ItemFailed, Parts, PoolBroken, SlotLost, SlotReady
from ugro.features.batches.rules import Aims
from ugro.features.batches.worker import Worker, loaded

pytest.importorskip("cloudpickle")
SMALL = Aims(probe_items=5, batch_s=0.002, least_s=0.0002)


class RandomEngine:
    """Slots in this process; what happens next is drawn. Follows the Protocol ``Engine``."""

    name = "random"

    def __init__(self, random: Random, *, losses: float = 0.0, deaths: float = 0.0) -> None:
        self._random, self._losses, self._deaths = random, losses, deaths
        self._pickler = LocalEngine(1)
        self._published: dict[str, list[bytes]] = {}
        self._slots: dict[int, deque[Parts]] = {}
        self._workers: dict[int, Worker] = {}
        self._events: deque[Event] = deque()
        self._started = 0
        self.most_under_way = 0

    def dumps(self, value: Any, buffer_callback: Callable[[Any], Any] | None) -> bytes:
        return self._pickler.dumps(value, buffer_callback)

    def start(self) -> int:
        for _ in range(3):
            self.replace()
        return 3

    def replace(self) -> None:
        self._started += 1
        self._workers[self._started] = Worker(self._published.__getitem__, [0], self._pickler.dumps)
        self._slots[self._started] = deque()
        self._events.append(SlotReady(self._started, f"node{self._started % 2}"))

    def publish(self, parts: Parts) -> str:
        name = f"name{len(self._published)}"
        self._published[name] = [bytes(part) for part in parts]
        return name

    def withdraw(self, name: str) -> None:
        self._published[name] = []

    def send(self, slot: int, parts: Parts) -> None:
        if slot in self._slots:
            self._slots[slot].append([bytes(part) for part in parts])
            self.most_under_way = max(self.most_under_way, len(self._slots[slot]))

    def wait(self, timeout_s: float | None) -> list[Event]:
        if self._events:
            return [self._events.popleft()]
        busy = [slot for slot, batches in self._slots.items() if batches]
        if not busy or (timeout_s == 0 and self._random.random() < 0.5):
            return []
        slot = self._random.choice(busy)
        if self._random.random() < self._losses:
            return [self._lost(slot, None, is_innocent=True)]
        if self._random.random() < self._deaths:  # somebody kills its process: no item is bad, and none may fail
            return [self._lost(slot, None)]
        return [Answered(slot, self._workers[slot].answer(self._slots[slot].popleft()))]

    def end(self, slot: int) -> None:
        if slot in self._slots:
            self._events.append(self._lost(slot, None))

    def _lost(self, slot: int, at: int | None, *, is_innocent: bool = False) -> SlotLost:
        del self._slots[slot], self._workers[slot]
        return SlotLost(slot, "drawn", at, is_innocent)

    def close(self) -> None:
        self._slots.clear()


class Square:
    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __call__(self, number: int) -> int:
        if number in self.bad:
            raise ValueError(number)
        return number * number


@given(
    count=st.integers(0, 300),
    bad=st.sets(st.integers(0, 299), max_size=5),
    seed=st.integers(0, 1 << 32),
    losses=st.sampled_from([0.0, 0.1, 0.2]),
    is_generator=st.booleans(),
)
def test_results_are_right_and_in_order_whatever_happens(
    count: int, bad: set[int], seed: int, losses: float, is_generator: bool
) -> None:
    engine = RandomEngine(Random(seed), losses=losses)
    items: Any = (number for number in range(count)) if is_generator else range(count)
    with ugro.Pool(engine=engine, aims=SMALL) as pool:
        results: list[Any] = list(pool.map(Square(bad), items, errors="return"))
    assert len(results) == count
    for number, result in enumerate(results):
        if number in bad:
            assert isinstance(result, ItemFailed)
            assert (result.index, result.item) == (number, number)
        else:
            assert result == number * number
    assert engine.most_under_way <= 3  # two batches, and before the first one the function


@given(seed=st.integers(0, 1 << 32), bad=st.sets(st.integers(0, 99), max_size=3))
def test_unordered_results_are_complete(seed: int, bad: set[int]) -> None:
    with ugro.Pool(engine=RandomEngine(Random(seed), losses=0.1), aims=SMALL) as pool:
        found = dict(pool.imap_unordered(Square(bad), range(100), errors="return").with_indices())
    assert {index for index, one in found.items() if isinstance(one, ItemFailed)} == bad
    assert all(found[number] == number * number for number in range(100) if number not in bad)


@given(seed=st.integers(0, 1 << 32))
def test_a_process_that_is_killed_now_and_then_costs_nobody_a_result(seed: int) -> None:
    with ugro.Pool(engine=RandomEngine(Random(seed), deaths=0.05), aims=SMALL) as pool:
        assert list(pool.map(Square(set()), range(100), retries=20)) == [number * number for number in range(100)]


class LateEngine(RandomEngine):
    """Answers only when it was looked at a few times: as a large answer does, which arrives in pieces."""

    def __init__(self) -> None:
        super().__init__(Random(1))
        self._looks = 0
        self.ended = 0

    def end(self, slot: int) -> None:
        self.ended += 1
        super().end(slot)

    def wait(self, timeout_s: float | None) -> list[Event]:
        self._looks += 1
        return super().wait(None) if self._events or self._looks % 3 == 0 else []


def test_a_reader_that_pauses_costs_no_item_its_time() -> None:
    engine = LateEngine()
    with ugro.Pool(engine=engine, aims=SMALL) as pool:
        results = pool.map(Square(set()), range(100), timeout_s=0.3)
        found = [next(results)]
        time.sleep(0.5)  # longer than any item may take: this is what is tested
        assert [*found, *results] == [number * number for number in range(100)]
    assert engine.ended == 0


def test_what_a_slot_does_after_an_item_that_was_just_in_time_is_not_late() -> None:
    class Racing(LateEngine):
        """A slot that is ended has just answered, and has begun its next batch."""

        def end(self, slot: int) -> None:
            parts = self._slots[slot].popleft()
            at = loaded(self._slots[slot][0])[2] if self._slots[slot] else None
            self._events += [Answered(slot, self._workers[slot].answer(parts)), self._lost(slot, at)]

        def wait(self, timeout_s: float | None) -> list[Event]:
            busy = any(len(batches) == 2 and loaded(batches[0])[0] for batches in self._slots.values())
            if busy and not self._events:  # until its time is over
                time.sleep(0 if timeout_s is None else timeout_s)
                return []
            return RandomEngine.wait(self, None)

    with ugro.Pool(engine=Racing(), aims=SMALL) as pool:
        found = list(pool.map(Square(set()), range(100), timeout_s=0.02, retries=0))
    assert found == [number * number for number in range(100)]


def test_items_that_cannot_be_pickled_together_are_sent_apart() -> None:
    class Narrow(RandomEngine):
        def dumps(self, value: Any, buffer_callback: Callable[[Any], Any] | None) -> bytes:
            if isinstance(value, tuple) and len(value) == 6 and len(value[5]) > 1:
                raise MemoryError
            return super().dumps(value, buffer_callback)

    with ugro.Pool(engine=Narrow(Random(1)), aims=SMALL) as pool:
        assert list(pool.map(Square(set()), range(10))) == [number * number for number in range(10)]


def test_a_reader_who_waits_for_the_first_item_is_not_given_all_failures_meanwhile() -> None:
    class Stuck(RandomEngine):
        """The first item is done when nothing else is left to do."""

        def wait(self, timeout_s: float | None) -> list[Event]:
            if self._events:
                return [self._events.popleft()]
            first = [one for one, batches in self._slots.items() if batches and loaded(batches[0])[2:6:3] == (0, [0])]
            busy = [one for one, batches in self._slots.items() if batches and one not in first]
            if slot := [*busy, *first][:1]:
                return [Answered(slot[0], self._workers[slot[0]].answer(self._slots[slot[0]].popleft()))]
            return []

    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(5000):
            read.append(number)
            yield number

    aims = Aims(probe_items=1, batch_s=1e-9, least_s=1e-9, most_buffered_bytes=100_000)
    with ugro.Pool(engine=Stuck(Random(1)), aims=aims) as pool:
        results = pool.map(Square(set(range(1, 5000))), numbers(), errors="return", retries=0)
        assert next(results) == 0
        assert len(read) < 200
        results.close()


def test_a_pool_whose_slots_all_end_at_once_says_so() -> None:
    class Barren(RandomEngine):
        def replace(self) -> None:
            self._started += 1
            self._events.append(SlotLost(self._started, "exit code 1", is_innocent=True))

    with ugro.Pool(engine=Barren(Random(1))) as pool, pytest.raises(PoolBroken, match="end at once: exit code 1"):
        list(pool.map(str, range(3)))


def test_progress_counts_by_node() -> None:
    with ugro.Pool(engine=RandomEngine(Random(1)), aims=SMALL) as pool:
        results = pool.map(Square({7}), range(100), errors="return")
        list(results)
        progress = results.progress
    assert (progress.done, progress.failed, progress.total) == (100, 1, 100)
    assert sum(progress.nodes.values()) == 99
    assert set(progress.nodes) <= {"node0", "node1"}
