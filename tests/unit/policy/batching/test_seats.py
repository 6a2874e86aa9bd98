"""On which nodes a pool goes."""

from __future__ import annotations

import pytest

from ugro.features.batches.rules import Candidate, Wish, choose
from ugro.kernel.support.errors import NotFound, Unsatisfiable, UsageError

NODES = [
    Candidate("slow", 2),
    Candidate("busy", 16, held_cores=12),
    Candidate("big", 8, labels=("fast",)),
    Candidate("down", 64, problem="connection refused", labels=("fast",)),
    Candidate("full", 4, held_cores=4),
]


def test_all_nodes_that_can_be_used_get_a_slot_for_each_free_core() -> None:
    assert choose(NODES, Wish()) == [("big", 8), ("busy", 4), ("slow", 2), ("full", 1)]


def test_of_a_number_of_nodes_those_with_most_free_cores_are_taken() -> None:
    assert choose(NODES, Wish(2)) == [("big", 8), ("busy", 4)]
    assert choose(NODES, Wish(2, on_each=3)) == [("big", 3), ("busy", 3)]


def test_a_number_of_slots_is_shared_out_by_free_cores() -> None:
    assert choose(NODES, Wish(2, slots=6)) == [("big", 4), ("busy", 2)]
    assert choose(NODES, Wish(slots=1)) == [("big", 1)]
    assert choose([Candidate("a", 2), Candidate("b", 2)], Wish(slots=2)) == [("a", 1), ("b", 1)]
    assert choose([Candidate("a", 1)], Wish(slots=3)) == [("a", 3)]


def test_named_nodes_are_taken_as_they_are_each_once() -> None:
    assert choose(NODES, Wish(("slow", "big", "slow"))) == [("slow", 2), ("big", 8)]
    assert choose(NODES, Wish(("@fast", "big", "slow"))) == [("big", 8), ("slow", 2)]


@pytest.mark.parametrize(
    ("wish", "kind", "words"),
    [
        (Wish(5), Unsatisfiable, "4 of 5 nodes can be used, and 5 are needed (down: connection refused)"),
        (Wish(("down",)), Unsatisfiable, "down: connection refused"),
        (Wish(("none",)), NotFound, "no node 'none' in this cluster"),
        (Wish(("@blue",)), NotFound, "no node has the label @blue"),
        (Wish(0), UsageError, "a pool needs at least one node, not 0"),
        (Wish(1, slots=0), UsageError, "a pool needs at least one worker, not 0"),
    ],
)
def test_what_cannot_be_had_is_one_clear_error(wish: Wish, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as refused:
        choose(NODES, wish)
    assert str(refused.value) == words


def test_a_cluster_without_any_usable_node_says_why() -> None:
    with pytest.raises(Unsatisfiable, match="0 of 1 nodes can be used, and 1 are needed"):
        choose([NODES[3]], Wish())
