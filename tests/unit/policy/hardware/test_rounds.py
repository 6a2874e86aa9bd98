"""Who is measured when, and for how long."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.hardware.model import Mode, Part
from ugro.features.hardware.rules import Budget, phases, rounds, waves


@given(st.integers(0, 17))
def test_every_pair_meets_once_and_no_node_is_in_two_pairs_at_a_time(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    found = rounds(names)
    met = [frozenset(pair) for pairs in found for pair in pairs]
    assert sorted(map(sorted, met)) == [list(pair) for pair in sorted(map(sorted, combinations(names, 2)))]
    for pairs in found:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    assert len(found) <= max(0, count - 1 + count % 2), "as few rounds as a tournament needs"


def test_nodes_on_one_machine_take_turns_and_others_do_not_wait() -> None:
    machines = {"a": "m1", "b": "m1", "c": "m2", "d": "m1"}
    assert waves(machines) == [["a", "c"], ["b"], ["d"]]


@pytest.mark.parametrize(("mode", "most_s"), [(Mode.QUICK, 15.0), (Mode.FULL, 120.0)])
def test_all_of_it_takes_no_longer_than_promised(mode: Mode, most_s: float) -> None:
    budget = Budget(mode, phases(frozenset(Part), 3))
    assert budget.bound_s == most_s
    assert sum(map(budget.aim_s, budget.phases)) < most_s
    for phase in budget.phases:  # each takes all that it may
        budget.spent_s += budget.limit_s(phase)
    assert budget.spent_s == pytest.approx(most_s)


def test_a_slow_phase_takes_no_time_from_those_after_it() -> None:
    budget = Budget(Mode.QUICK, phases(frozenset(Part), 2))
    budget.spent_s = budget.limit_s("machine")
    for phase in ("devices", "network", "allreduce"):
        assert budget.limit_s(phase) >= budget.aim_s(phase) - 1e-9
        budget.spent_s += budget.aim_s(phase)


def test_nodes_that_share_a_machine_get_their_own_time_each() -> None:
    budget = Budget(Mode.QUICK, phases(frozenset(Part), 3), turns=3)
    for turn in range(3):
        assert budget.limit_s("machine", turn) >= budget.aim_s("machine")
        budget.spent_s += budget.aim_s("machine")
    assert budget.bound_s > 15


def test_a_single_node_has_no_network_to_measure() -> None:
    assert phases(frozenset(Part), 1) == ["machine", "devices"]
    assert phases({Part.NETWORK}, 1) == []
    assert phases({Part.NETWORK, Part.STORAGE}, 2) == ["machine", "network"]
