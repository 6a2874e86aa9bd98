"""Weights, learned from simulated replicas of unequal and changing speeds, behind a door that works like HAProxy."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.services.model import EVEN_WEIGHT, MOST_WEIGHT, Pace
from ugro.features.services.rules.load import (
    FACTOR_PER_MINUTE,
    LEAST_REQUESTS,
    SLOW_START_S,
    Weighing,
    adopted,
    elasticity,
    next_weights,
    weight_of_new,
)

LOOK_S = 10.0
Speed = Callable[[float], float]  # requests a second, at a time


@dataclass
class Simulated:
    """One that computes a request after the other, or all at once, a little slower for each."""

    speed: Speed
    is_serial: bool = True
    at_once: int = 0
    free_at_s: float = 0.0
    pace: Pace = field(default_factory=Pace)

    def accept(self, now_s: float) -> float:
        """When it will have answered."""
        self.at_once += 1
        took_s = 1 / self.speed(now_s)
        if self.is_serial:
            self.free_at_s = max(now_s, self.free_at_s) + took_s
            return self.free_at_s
        return now_s + took_s * (1 + 0.02 * self.at_once)

    def answer(self, took_s: float) -> None:
        x, y = math.log(self.at_once), math.log(took_s)
        self.pace = Pace(*(a + b for a, b in zip(astuple(self.pace), (1, x, y, x * x, x * y), strict=True)))
        self.at_once -= 1


class World:
    def __init__(self, servers: Mapping[str, Simulated], per_s: float, seed: int = 1) -> None:
        self.servers = dict(servers)
        self.weighing = Weighing()
        self.now_s = 0.0
        self.history: list[dict[str, int]] = []
        self._per_s = per_s
        self._chance = random.Random(seed)
        self._due: list[tuple[float, str, float]] = []
        self._next_s = 0.0

    def run(self, seconds: float, first: Mapping[str, float] | None = None) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            paces = {name: server.pace for name, server in self.servers.items()}
            self.weighing = next_weights(self.weighing, paces, first or {}, self.now_s)
            self.history.append(self.weighing.weights)
            self._until(self.now_s + LOOK_S)

    def _until(self, end_s: float) -> None:
        while (now_s := min(self._next_s, self._due[0][0] if self._due else math.inf)) < end_s:
            if self._due and self._due[0][0] == now_s:
                _, name, began_s = heapq.heappop(self._due)
                if name in self.servers:
                    self.servers[name].answer(max(1e-4, now_s - began_s))
            else:
                name = min(self.servers, key=self._order)
                heapq.heappush(self._due, (self.servers[name].accept(now_s), name, now_s))
                self._next_s = now_s + self._chance.expovariate(self._per_s)
        self.now_s = end_s

    def _order(self, name: str) -> tuple[float, float]:
        """As HAProxy's leastconn: idle ones are all equal."""
        at_once = self.servers[name].at_once
        return ((at_once + 1) / self.weighing.weights[name] if at_once else 0.0, self._chance.random())


def constant(speed: float) -> Speed:
    return lambda now_s: speed


@pytest.mark.parametrize("is_serial", [True, False])
@pytest.mark.parametrize("load", [0.2, 0.7])
def test_weights_find_the_speeds_and_stay_there(load: float, is_serial: bool) -> None:
    speeds = {"fast": 10.0, "middle": 5.0, "slow": 2.5}
    world = World({name: Simulated(constant(v), is_serial) for name, v in speeds.items()}, load * sum(speeds.values()))
    world.run(600)
    for seen in world.history[-20:]:
        assert 1.5 < seen["fast"] / seen["middle"] < 2.7, seen
        assert 1.5 < seen["middle"] / seen["slow"] < 2.7, seen
    changes = sum(a != b for a, b in pairwise(world.history[-20:]))
    assert changes < 12, "they do not swing"
    assert world.weighing.weights["fast"] == pytest.approx(EVEN_WEIGHT, rel=0.1)


def test_a_replica_that_becomes_slower_loses_weight_and_gets_it_back() -> None:
    speeds = {"steady": constant(10.0), "changing": lambda now_s: 2.0 if 300 <= now_s < 700 else 10.0}
    world = World({name: Simulated(speed) for name, speed in speeds.items()}, 6)
    ratios = []
    for _ in range(4):
        world.run(290)
        weights = world.weighing.weights
        ratios.append(weights["changing"] / weights["steady"])
    assert 0.8 < ratios[0] < 1.25
    assert ratios[1] < 0.4
    assert ratios[3] > 0.8


def test_speeds_that_are_known_beforehand_are_used_from_the_start() -> None:
    replicas = {"a": Pace(), "b": Pace()}
    after_s = SLOW_START_S + 1
    known = next_weights(Weighing(), replicas, {"a": 4.0, "b": 1.0}, 0.0)
    known = next_weights(known, replicas, {}, after_s)
    assert known.weights == {"a": 100, "b": 25}
    equal = next_weights(next_weights(Weighing(), replicas, {}, 0.0), replicas, {}, after_s)
    assert equal.weights == {"a": 100, "b": 100}


def test_replicas_that_come_one_by_one_are_weighed_by_what_is_known_of_all() -> None:
    speeds = {"slow": 0.25, "fast": 1.0, "middle": 0.5}
    known, paces = Weighing(), {}
    for now_s, name in enumerate(speeds):
        paces[name] = Pace()
        known = next_weights(known, paces, {one: speeds[one] for one in paces}, 100.0 * now_s)
    known = next_weights(known, paces, speeds, 400.0)
    assert known.weights == {"slow": 25, "fast": 100, "middle": 50}


def test_a_new_replica_is_weighed_in_the_scale_of_those_that_have_learned() -> None:
    known = adopted({"a": 100, "b": 100}, 0.0)  # measured as 1 and 0.5, but found equal: measured figures mislead by √2
    known = next_weights(known, {name: Pace() for name in "abc"}, {"a": 1.0, "b": 0.5, "c": 0.5}, 0.0)
    known = next_weights(known, {name: Pace() for name in "abc"}, {}, SLOW_START_S + 1)
    assert known.weights == {"a": 100, "b": 100, "c": 71}


def test_the_first_weight_of_a_server_is_that_of_its_speed_among_those_that_come_with_it() -> None:
    together = {"a": 1.0, "b": 0.25}
    first = {name: weight_of_new(Weighing(), name, together, 0.0) for name in together}
    assert first["a"] == pytest.approx(4 * first["b"], rel=0.2)
    assert weight_of_new(Weighing(), "a", {"a": 0.25}, 0.0) == EVEN_WEIGHT, "one that is alone gets all"
    assert weight_of_new(adopted({"a": 100}, 0.0), "b", {"a": 1.0, "b": 0.5}, 0.0) < 50, "it starts slowly"
    assert weight_of_new(Weighing(), "a", {}, 0.0) == EVEN_WEIGHT


def test_a_new_replica_starts_slowly_beside_others() -> None:
    known = next_weights(Weighing(), {"a": Pace()}, {}, 0.0)
    assert known.weights == {"a": 100}, "one that is alone gets all"
    weights = []
    for now_s in (100.0, 110.0, 120.0, 130.0):
        known = next_weights(known, {"a": Pace(), "b": Pace()}, {}, now_s)
        weights.append(known.weights["b"])
    assert weights == [25, 50, 75, 100]
    assert known.weights["a"] == 100


def test_a_door_that_was_started_again_counts_from_the_start() -> None:
    many = Pace(1000, 0, -2000, 0, 0)
    known = next_weights(Weighing(), {"a": many, "b": many}, {}, 0.0)
    known = next_weights(known, {"a": Pace(5, 0, -10, 0, 0), "b": many}, {}, 10.0)
    assert known.replicas["a"].seen.count == 5
    assert known.replicas["a"].recent.count < many.count + 5


def test_elasticity_is_that_of_the_replicas() -> None:
    def pace(e: float) -> Pace:
        points = [(math.log(n), e * math.log(n) - 3) for n in (1, 2, 3, 5, 8) * 40]
        return Pace(
            len(points),
            sum(x for x, _ in points),
            sum(y for _, y in points),
            sum(x * x for x, _ in points),
            sum(x * y for x, y in points),
        )

    assert elasticity({"a": pace(1.0), "b": pace(1.0)}) > 0.95
    assert elasticity({"a": pace(0.0)}) < 0.05
    assert elasticity({}) == 0.5


PACES = st.builds(
    lambda count, n, seconds: Pace(count, count * math.log(n), count * math.log(seconds), count * math.log(n) ** 2, 0),
    st.integers(0, 500),
    st.integers(1, 50),
    st.floats(0.001, 1000),
)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), PACES, min_size=1), min_size=1, max_size=12), st.floats(1, 60))
def test_weights_are_always_allowed_and_move_no_faster_than_they_may(
    looks: list[dict[str, Pace]], look_s: float
) -> None:
    known = Weighing()
    for number, paces in enumerate(looks):
        before, known = known, next_weights(known, paces, {}, number * look_s)
        assert set(known.weights) == set(paces)
        assert all(1 <= weight <= MOST_WEIGHT for weight in known.weights.values())
        for name in set(before.replicas) & set(paces):
            factor = known.replicas[name].speed / before.replicas[name].speed
            assert abs(math.log(factor)) <= math.log(FACTOR_PER_MINUTE) * look_s / 60 + 1e-9


def test_an_agent_that_comes_back_goes_on_with_what_the_door_has() -> None:
    known = adopted({"a": 100, "b": 31}, 50.0)
    known = next_weights(known, {"a": Pace(500, 0, -1000, 0, 0), "b": Pace(500, 0, -900, 0, 0)}, {}, 50.0)
    assert known.weights == {"a": 100, "b": 31}
    known = next_weights(known, {"a": Pace(), "b": Pace(), "c": Pace()}, {}, 51.0)
    assert (known.weights["a"], known.weights["b"]) == (100, 31)


def test_too_few_requests_change_nothing() -> None:
    few = LEAST_REQUESTS - 1
    known = next_weights(Weighing(), {"a": Pace(), "b": Pace()}, {}, 0.0)
    known = next_weights(known, {"a": Pace(few, 0, 0, 0, 0), "b": Pace(few, 0, few * 3, 0, 0)}, {}, 60.0)
    assert known.weights == {"a": 100, "b": 100}
