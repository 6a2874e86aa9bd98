"""When local SGD pays, before a launch."""

from __future__ import annotations

import pytest

from tests.unit.policy.planning.test_prediction import BATCH, FREE, known, trial
from ugro.features.planning.model import local_title
from ugro.features.planning.rules import Link, make_plan, predict_local

SLOW = Link(1e6)  # eight seconds for the gradients


def test_on_a_slow_network_ranks_do_what_they_do_alone() -> None:
    found = predict_local(known(trial("a", 0.01), trial("b", 0.01), link=SLOW))
    assert found is not None
    assert found.samples_per_s == pytest.approx(200 * 20 / 24, rel=0.02)
    assert found.exchange_s == pytest.approx(4, rel=0.01)
    assert found.steps == pytest.approx(20 / (BATCH / 2 * 0.01), rel=0.05)


def test_a_plan_has_it_where_it_is_clearly_faster() -> None:
    plan = make_plan("x", known(trial("a", 0.01), trial("b", 0.01), trial("c", 0.01), link=SLOW), {})
    assert plan.local is not None
    assert plan.local.samples_per_s > 1.5 * plan.best.samples_per_s
    assert local_title(plan.local, 3) == f"all three, local SGD every {plan.local.steps} steps"


def test_a_plan_does_not_have_it_on_a_fast_network() -> None:
    assert make_plan("x", known(trial("a", 0.01), trial("b", 0.01), link=FREE), {}).local is None


def test_one_node_has_nothing_to_exchange() -> None:
    assert predict_local(known(trial("a", 0.01))) is None


def test_a_training_that_is_local_sgd_itself_is_told_from_what_is_predicted_of_sets() -> None:
    one, other = (trial(name, 0.01, is_of_local=True) for name in ("a", "b"))
    plan = make_plan("x", known(one, other), {})
    assert plan.is_of_local
    assert plan.local is not None, "what it does, whether that is faster or not"
    assert any("this training is local SGD" in note for note in plan.notes)
    plan = make_plan("x", known(trial("a", 0.01), trial("b", 0.01)), {})
    assert (plan.is_of_local, plan.local) == (False, None)
    assert not any("local SGD" in note for note in plan.notes)
