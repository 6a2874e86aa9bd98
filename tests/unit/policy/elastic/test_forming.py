"""Who belongs to the next group of an elastic training."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

from ugro.train.rules.failures import GRACE_S, Forming, TooFew, Wait, decide

ALL = frozenset({0, 1, 2})
NOBODY: frozenset[int] = frozenset()


def forming(ready: set[int], here: dict[int, float] | None = None, **more: object) -> Forming:
    view = Forming(ALL, here or {}, frozenset(ready), NOBODY, NOBODY, 0.0, timeout_s=60.0, min_ranks=1)
    return replace(view, **more)  # type: ignore[arg-type]


def test_a_group_forms_at_once_when_all_are_there() -> None:
    assert decide(forming({0, 1, 2})) == ALL


def test_a_rank_that_does_not_answer_is_waited_for_during_the_grace_only() -> None:
    assert decide(forming({0, 1}, waited_s=GRACE_S / 2)) == Wait()
    assert decide(forming({0, 1}, waited_s=GRACE_S)) == frozenset({0, 1})


def test_a_rank_that_computes_is_waited_for() -> None:
    busy = forming({0, 1}, here={2: 5.0}, waited_s=50.0)
    assert decide(busy) == Wait()


def test_a_script_that_was_silent_for_longer_than_the_timeout_is_left_behind_after_the_grace() -> None:
    hangs = forming({0, 1}, here={2: 60.0}, waited_s=0.0)
    assert decide(hangs) == frozenset({0, 1})


def test_too_few_are_no_group() -> None:
    assert decide(forming({0}, waited_s=GRACE_S, min_ranks=2)) == TooFew(frozenset({0}))


def test_one_who_asked_to_join_is_waited_for_during_the_grace() -> None:
    asked = forming({0, 1, 2}, expected=frozenset({3}))
    assert decide(asked) == Wait()
    assert decide(replace(asked, waited_s=GRACE_S)) == ALL
    assert decide(replace(asked, ready=ALL | {3}, joining=frozenset({3}))) == ALL | {3}


def test_ranks_without_a_state_never_go_on_alone() -> None:
    assert decide(forming({3}, joining=frozenset({3}), waited_s=1000.0)) == Wait()


def test_whoever_forms_a_group_is_ready_and_keeps_a_state_and_nobody_who_may_come_is_left_behind() -> None:
    subsets = [frozenset(some) for some in chain.from_iterable(combinations((0, 1, 2), n) for n in range(4))]
    for ready in subsets:
        for here in subsets:
            for waited_s in (0.0, GRACE_S, 59.0, 61.0):
                found = decide(forming(set(ready), dict.fromkeys(here, 0.5), waited_s=waited_s))
                if isinstance(found, frozenset):
                    assert found == ready
                    assert found
                    assert waited_s >= 59.0 or not (here - ready)
