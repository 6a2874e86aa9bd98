"""Where a door goes when its node was lost, and at which address it answers then."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tests.unit.policy.serving.places import service
from ugro.features.services.model import DoorPlace
from ugro.features.services.rules.report import Candidate, in_order, moved, next_nodes, report_of
from ugro.features.services.rules.steps import View
from ugro.kernel.support.codec import decode

PLACE = DoorPlace("gpu1", "python3", "10.0.0.1", number=3)
LOST = [Candidate(name, is_reachable=False) for name in ("gpu1", "away")]
NODES = [*LOST, Candidate("gpu2"), Candidate("gpu3")]


def test_a_door_is_on_this_machine_or_the_master_or_where_replicas_are() -> None:
    nodes = [Candidate("a"), Candidate("b"), Candidate("m", is_master=True), Candidate("here", is_here=True)]
    assert in_order(nodes, ["b"]) == ["here", "m", "b", "a"]


def test_a_door_whose_node_was_lost_goes_to_one_that_is_reached() -> None:
    assert next_nodes(NODES, ["gpu3"], PLACE, has_failed=False) == ["gpu3", "gpu2"]


def test_its_own_node_is_the_first_choice_when_it_is_back_and_the_last_when_it_failed_there() -> None:
    back = [Candidate("gpu2"), Candidate("gpu1")]
    assert next_nodes(back, [], PLACE, has_failed=False) == ["gpu1", "gpu2"]
    assert next_nodes(back, [], PLACE, has_failed=True) == ["gpu2", "gpu1"]


@pytest.mark.parametrize(
    ("bind", "after"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("10.0.0.1", "10.0.0.2")]
)
def test_a_fixed_address_of_a_lost_node_is_not_kept(bind: str, after: str) -> None:
    of = service()
    of = replace(of, door=PLACE, spec=replace(of.spec, bind=bind))
    there = moved(of, DoorPlace("gpu2", "python3", "10.0.0.2"))
    assert (there.spec.bind, there.door.number, there.door.moved_from) == (after, 4, "gpu1")
    [note] = report_of(View(there)).notes
    assert "gpu1" in note
    assert report_of(View(there)).url in note


def test_a_door_that_is_started_again_on_its_own_node_has_not_moved() -> None:
    of = replace(service(), door=PLACE)
    again = moved(of, PLACE)
    assert (again.door, again.spec) == (replace(PLACE, number=4), of.spec)
    assert report_of(View(again)).notes == ()
    back = moved(moved(of, DoorPlace("gpu2", "python3", "10.0.0.2")), replace(PLACE, number=1))
    assert (back.door.node, back.door.moved_from, back.door.number) == ("gpu1", "gpu2", 5)


def test_the_place_of_a_door_that_once_had_a_whole_folder_is_read() -> None:
    """As an older agent has recorded it."""
    old = {**asdict(PLACE), "folder": "/home/ugro/grid_workspace/.ugro/services/k"}
    assert decode(DoorPlace, old) == PLACE
