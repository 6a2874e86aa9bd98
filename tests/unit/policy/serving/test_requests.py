from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.policy.serving.places import service
from ugro.features.services.model import Replica
from ugro.features.services.rules.rollout import decided, updated
from ugro.kernel.support.errors import NotAllowed


def test_a_revision_gets_its_number_when_its_update_begins() -> None:
    made = replace(service().of(1), source="new")
    first = updated(service(), made, None, 2, "now")
    with pytest.raises(NotAllowed, match="under way"):
        updated(first, made, None, 2, "now")
    second = updated(decided(first, promotes=False), made, None, 2, "now")  # it was made while the first one ran
    assert [one.number for one in second.revisions] == [1, 2, 3, 4]
    assert second.rollout is not None
    assert second.of(second.rollout.revision).source == "new"


def test_updates_that_were_rolled_back_are_not_kept_for_ever() -> None:
    made, of = service().of(1), replace(service(), replicas=(Replica(1, 2),))
    for _ in range(50):
        of = decided(updated(of, made, None, 2, "now"), promotes=False)
    kept = [one.number for one in of.revisions]
    assert len(kept) <= 13
    assert kept[:2] == [1, 2], "the current one, and one that a replica still is"
    assert kept[-1] == 52
