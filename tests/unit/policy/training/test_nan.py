"""What becomes of a step whose loss or gradients are not finite."""

from __future__ import annotations

import pytest

from ugro.kernel.support.errors import UsageError
from ugro.train.rules.failures import MOST_IN_A_ROW, Incident, OnNan, Response, Wrong, on_nan, response

LOSS = Incident("rank 1 (gpu2)", 7, Wrong.LOSS)
HARMLESS = Incident("rank 1 (gpu2)", 7, Wrong.LOSS, is_harmless=True)


def test_a_run_that_is_to_stop_ends_with_who_it_was_and_when() -> None:
    assert response(OnNan.STOP, [LOSS], 0) == Response(stops="the loss of rank 1 (gpu2) is not finite in step 7")


def test_an_update_is_left_out_until_nothing_is_learnt_any_more() -> None:
    assert response(OnNan.SKIP, [LOSS], 3) == Response(skips=True, in_a_row=4)
    assert response(OnNan.SKIP, [], 4) == Response(), "one step that is right begins anew"
    stops = response(OnNan.SKIP, [LOSS], MOST_IN_A_ROW - 1).stops
    assert stops == f"{LOSS.words}, and so it was in {MOST_IN_A_ROW} steps in a row"


def test_what_is_ignored_never_ends_a_run() -> None:
    assert response(OnNan.IGNORE, [LOSS], 10**6).stops is None


@pytest.mark.parametrize("choice", [OnNan.STOP, OnNan.SKIP])
def test_of_what_is_harmless_no_update_is_left_out(choice: OnNan) -> None:
    assert response(choice, [HARMLESS], 0) == Response(in_a_row=1)
    assert response(choice, [HARMLESS], MOST_IN_A_ROW - 1).stops is not None


def test_a_rank_for_which_it_is_not_harmless_decides_for_all() -> None:
    assert response(OnNan.STOP, [HARMLESS, LOSS], 0).stops is not None
    assert response(OnNan.SKIP, [HARMLESS, LOSS], 0).skips


def test_another_choice_is_named_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="unknown choice for nan: 'never'") as caught:
        on_nan("never")
    assert caught.value.hint == "one of stop, skip, ignore"
