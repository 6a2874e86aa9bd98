"""What a sweep does next, and which trials end early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.sweeps.model import Budget, Point, SweepState, Trial, TrialState
from ugro.features.sweeps.rules.decision import (
    MOST_KEPT,
    Act,
    Decision,
    View,
    best_of,
    best_trial,
    decide,
    eta_s,
    joined,
    merged,
    outcome,
    predecessor,
    score_of,
    thinned,
    to_prune,
    total,
)
from ugro.features.sweeps.rules.reading import read
from ugro.features.sweeps.rules.spec import Metric, Pruning

LOSS = Metric("loss")
SPEC = read({"metric": {"name": "loss"}, "method": "random", "parameters": {"x": {"values": list(range(100))}}})


def trial(number: int, state: TrialState, *values: float, **more: Any) -> Trial:
    history = tuple(Point(step, value) for step, value in enumerate(values, start=1))
    best = min(values, default=None)
    return Trial(number, (("x", str(number)),), state=state, history=history, best=best, **more)


def done(count: int, state: TrialState = TrialState.COMPLETE) -> list[Trial]:
    return [trial(number, state, float(number)) for number in range(1, count + 1)]


def test_a_sweep_of_which_no_trial_succeeded_has_failed() -> None:
    end, stop = Decision(Act.END, "every point was tried: 2"), Decision(Act.STOP, "the first 3 trials failed: no disk")
    failed = [trial(1, TrialState.FAILED, reason="exit code 1"), trial(2, TrialState.INFEASIBLE, reason="no memory")]
    said = "every point was tried: 2; none succeeded: no memory"
    assert outcome(end, failed) == (SweepState.FAILED, said)
    assert outcome(stop, failed) == (SweepState.FAILED, stop.reason)
    for one in (TrialState.COMPLETE, TrialState.PRUNED):
        assert outcome(end, [*failed, trial(3, one)]) == (SweepState.DONE, end.reason)
        assert outcome(stop, [*failed, trial(3, one)]) == (SweepState.STOPPED, stop.reason)
    assert outcome(end, [trial(1, TrialState.CANCELLED)])[0] is SweepState.DONE, "a person ended it"


def test_one_trial_waits_beyond_what_runs() -> None:
    running = done(3, TrialState.RUNNING)
    assert decide(View(SPEC, Budget(), running, waiting=0)).act is Act.TRY
    assert decide(View(SPEC, Budget(), running, waiting=1)).act is Act.WAIT
    assert decide(View(SPEC, Budget(parallel=3), running, waiting=0)).act is Act.WAIT
    assert decide(View(SPEC, Budget(parallel=4), running, waiting=4)).act is Act.TRY


def test_the_next_trial_is_made_ready_while_one_is_ended_and_starts_after_it() -> None:
    running = done(3, TrialState.RUNNING)
    assert decide(View(SPEC, Budget(parallel=3), running, leaving=1)).act is Act.TRY
    assert decide(View(SPEC, Budget(parallel=3), done(4, TrialState.RUNNING), leaving=1)).act is Act.WAIT
    assert predecessor(3, 3, [7], ()) == 7
    assert predecessor(3, 4, [7, 8], {7}) == 8, "each end makes room for one"
    assert predecessor(3, 2, [7], ()) is None, "there is room for it anyway"
    assert predecessor(None, 9, [7], ()) is None


def test_of_values_that_are_heard_and_stored_the_longer_series_counts() -> None:
    stored = {(1, 0): [(1, 0.5), (2, 0.4)], (2, 0): [(3, 0.3)]}
    heard = {(2, 0): [(3, 0.3), (4, 0.2)], (1, 0): [(1, 0.5)]}
    assert joined(stored, heard) == {(1, 0): [(1, 0.5), (2, 0.4)], (2, 0): [(3, 0.3), (4, 0.2)]}
    assert joined({}, heard) == heard


def test_the_time_that_is_left_counts_what_runs_and_not_what_came_from_the_cache() -> None:
    """Two at once, ten seconds each: after the first two of ten, eight are left on two lanes."""
    ended = [trial(number, TrialState.COMPLETE, 1.0, took_s=10.0) for number in (1, 2)]
    assert eta_s(View(SPEC, Budget(trials=10), ended, elapsed_s=10.0)) == pytest.approx(40.0)
    running = [trial(number, TrialState.RUNNING, took_s=5.0) for number in (3, 4)]
    assert eta_s(View(SPEC, Budget(trials=10), [*ended, *running], elapsed_s=15.0)) == pytest.approx(35.0)
    one = [trial(1, TrialState.COMPLETE, 1.0, took_s=10.0), trial(2, TrialState.RUNNING, took_s=9.0)]
    assert eta_s(View(SPEC, Budget(trials=10), one, elapsed_s=10.0)) == pytest.approx(8.1 * 10 / 1.9), "and not 90"
    cached = [*ended, *(trial(number, TrialState.COMPLETE, 1.0, took_s=0.0) for number in range(3, 7))]
    assert eta_s(View(SPEC, Budget(trials=10), cached, elapsed_s=10.0)) == pytest.approx(20.0)
    assert eta_s(View(SPEC, Budget(trials=10, time_s=25), ended, elapsed_s=10.0)) == pytest.approx(15.0)
    assert eta_s(View(SPEC, Budget(trials=10), running, elapsed_s=10.0)) is None


def test_trials_that_share_a_gpu_use_up_a_part_of_its_hours() -> None:
    ended = [trial(number, TrialState.COMPLETE, 1.0, took_s=20.0, gpus=1) for number in (1, 2)]
    assert decide(View(SPEC, Budget(gpu_s=36), ended)).act is Act.END
    assert decide(View(SPEC, Budget(gpu_s=36, trials_per_gpu=2), ended)).act is Act.TRY


def test_where_the_mean_counts_only_complete_trials_are_the_best() -> None:
    mean = replace(LOSS, is_mean=True)
    trials = [trial(1, TrialState.RUNNING, 0.1), trial(2, TrialState.PRUNED, 0.2), trial(3, TrialState.COMPLETE, 0.3)]
    assert (best := best_trial(mean, trials)) is not None
    assert best.number == 3
    assert score_of((Point(1, 1.0), Point(2, 3.0)), mean) == 2.0
    assert score_of((Point(1, 1e308), Point(2, 1e308)), mean) == 1e308, "one trial does not end all sweeps"


def test_brackets_of_asha_begin_at_other_rungs_and_are_compared_among_themselves() -> None:
    rule = Pruning("asha", bands=(1, 3), brackets=2)
    trials = [trial(number, TrialState.RUNNING, float(number)) for number in range(1, 9)]
    assert [found.number for found in to_prune(rule, LOSS, trials)] == [4, 6, 8], "the odd ones run to the third step"
    longer = [trial(number, TrialState.RUNNING, *[float(number)] * 3) for number in range(1, 9)]
    assert [found.number for found in to_prune(rule, LOSS, longer)] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (Budget(trials=5), "all 5 trials were made"),
        (Budget(time_s=60), "its time of"),
        (Budget(gpu_s=36), "its 0.01 GPU-hours are used up"),
        (Budget(no_improvement=4), "no improvement in 4 trials"),
    ],
)
def test_a_budget_ends_a_sweep_when_its_last_trial_has_ended(budget: Budget, says: str) -> None:
    trials = [replace(one, took_s=4.0, gpus=2) for one in done(5)]
    ends = decide(View(SPEC, budget, trials, elapsed_s=61))
    assert (ends.act, says in ends.reason) == (Act.END, True), ends
    trials[-1] = replace(trials[-1], state=TrialState.RUNNING)
    assert decide(View(SPEC, replace(budget, no_improvement=None), trials, elapsed_s=61)).act is not Act.END


def test_a_target_ends_a_sweep_also_where_more_is_better() -> None:
    spec = replace(SPEC, metric=Metric("accuracy", "maximize", 0.9))
    assert decide(View(spec, Budget(), [trial(1, TrialState.COMPLETE, 0.8)])).act is Act.TRY
    ends = decide(View(spec, Budget(), [trial(1, TrialState.COMPLETE, 0.95)]))
    assert (ends.act, ends.reason) == (Act.END, "trial 1 reached the target: accuracy 0.95")


def test_a_space_that_is_used_up_ends_it_and_stopped_points_are_open_again() -> None:
    spec = read({"parameters": {"x": {"values": [1, 2, 3]}}})
    assert total(spec, Budget()) == 3
    assert decide(View(spec, Budget(), done(3))).act is Act.END
    assert decide(View(spec, Budget(), [*done(2), trial(3, TrialState.STOPPED)])).act is Act.TRY
    assert decide(View(spec, Budget(), [*done(2), trial(3, TrialState.CANCELLED)])).act is Act.END


def test_failures_stop_a_sweep_that_has_nothing_else_to_show() -> None:
    failed = done(3, TrialState.FAILED)
    assert decide(View(SPEC, Budget(), failed[:2])).act is Act.TRY
    assert decide(View(SPEC, Budget(), failed)).act is Act.STOP
    assert decide(View(SPEC, Budget(), [*failed, trial(4, TrialState.COMPLETE, 1.0)])).act is Act.TRY
    assert decide(View(SPEC, Budget(max_failed=2), [*failed, trial(4, TrialState.COMPLETE, 1.0)])).act is Act.STOP
    assert decide(View(SPEC, Budget(), done(9, TrialState.INFEASIBLE))).act is Act.TRY, "memory is no failure"


def test_failures_before_it_was_resumed_do_not_stop_it_again() -> None:
    failed = done(3, TrialState.FAILED)
    assert decide(View(SPEC, Budget(failed_before=3), failed)).act is Act.TRY
    assert decide(View(SPEC, Budget(failed_before=3), done(6, TrialState.FAILED))).act is Act.STOP
    assert decide(View(SPEC, Budget(failed_before=3, max_failed=1), done(4, TrialState.FAILED))).act is Act.TRY
    assert decide(View(SPEC, Budget(failed_before=3, max_failed=1), done(5, TrialState.FAILED))).act is Act.STOP


def test_the_best_trial_may_still_run_and_the_first_of_equals_wins() -> None:
    trials = [trial(1, TrialState.COMPLETE, 2.0), trial(2, TrialState.RUNNING, 1.0), trial(3, TrialState.PRUNED, 1.0)]
    assert best_trial(LOSS, trials) == trials[1]
    assert best_trial(None, trials) is None


def wandb_stops(rule: Pruning, histories: Sequence[tuple[bool, list[float]]]) -> list[int]:
    """The rule of W&B's sweeps, in words of its own: an independent description to compare with."""
    stopped = []
    for number, (is_running, own) in enumerate(histories):
        reached = [band for band in rule.bands if band <= len(own)]
        if not is_running or not reached:
            continue
        band = reached[-1]
        values = sorted(history[band - 1] for _, history in histories if len(history) >= band)
        value = own[band - 1] if rule.is_strict else min(own)
        if value > values[math.floor(len(values) / rule.eta)]:
            stopped.append(number)
    return stopped


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=12)), max_size=10),
    st.sampled_from([2.0, 3.0]),
    st.booleans(),
    st.sampled_from([1, -1]),
)
def test_hyperband_stops_what_wandb_stops(
    runs: list[tuple[bool, list[int]]], eta: float, is_strict: bool, sign: int
) -> None:
    rule = Pruning("hyperband", (1, 3, 9), eta, is_strict)
    metric = Metric("loss", "minimize" if sign == 1 else "maximize")
    trials = [
        trial(number, TrialState.RUNNING if running else TrialState.COMPLETE, *(sign * value for value in values))
        for number, (running, values) in enumerate(runs)
    ]
    expected = wandb_stops(rule, [(running, list(map(float, values))) for running, values in runs])
    assert [one.number for one in to_prune(rule, metric, trials)] == expected


def test_hyperband_compares_with_long_trials_of_which_some_values_are_kept() -> None:
    """A loss that falls: at 81 values the ended ones were worse than they are now, and so is the running one."""

    def falling(number: int, state: TrialState, count: int) -> Trial:
        return trial(number, state, *(1.0 / step + number / 1000 for step in range(1, count + 1)))

    ended = [falling(number, TrialState.COMPLETE, 5000) for number in range(1, 7)]
    kept = [replace(one, history=thinned(one.history, 1)) for one in ended]
    rule = Pruning("hyperband", (3, 9, 27, 81))
    for number, is_worse in ((0, False), (9, True)):
        running = falling(number, TrialState.RUNNING, 85)
        for others in (ended, kept):
            assert bool(to_prune(rule, LOSS, [*others, running])) is is_worse, number


def test_asha_compares_at_equal_steps_so_a_slow_device_is_not_punished() -> None:
    rule = Pruning("asha", (2, 4, 8), 2.0)
    fast = trial(1, TrialState.RUNNING, 9, 8, 7, 6, 5, 4, 3, 2)
    slow = trial(2, TrialState.RUNNING, 8, 7)  # worse than the fast one now, better than it was at step 2
    assert to_prune(rule, LOSS, [fast, slow]) == []
    worse = trial(3, TrialState.RUNNING, 9, 9)
    [found] = to_prune(rule, LOSS, [fast, slow, worse])
    assert found.number == 3
    assert "step 2" in found.reason
    third = Pruning("asha", (2,), 3.0)
    others = [trial(number, TrialState.RUNNING, number, number) for number in range(1, 7)]
    assert [one.number for one in to_prune(third, LOSS, others)] == [3, 4, 5, 6], "a third of six goes on"
    assert [one.number for one in to_prune(third, LOSS, others[:3])] == [2, 3]


def test_asha_without_bands_waits_for_a_complete_trial() -> None:
    rule = Pruning("asha", (), 3.0)
    good = trial(1, TrialState.RUNNING, *[1.0] * 50)
    bad = trial(2, TrialState.RUNNING, *[5.0] * 50)
    assert to_prune(rule, LOSS, [good, bad]) == []
    assert [one.number for one in to_prune(rule, LOSS, [replace(good, state=TrialState.COMPLETE), bad])] == [2]


def test_the_median_rule_needs_some_complete_trials() -> None:
    rule = Pruning("median", startup=3)
    complete = [trial(number, TrialState.COMPLETE, 3.0, 2.0, 1.0) for number in range(3)]
    bad, good = trial(8, TrialState.RUNNING, 3.0, 2.5), trial(9, TrialState.RUNNING, 3.0, 1.9)
    assert [one.number for one in to_prune(rule, LOSS, [*complete, bad, good])] == [8]
    assert to_prune(rule, LOSS, [*complete[1:], bad, good]) == []


def test_a_trial_that_went_back_to_a_checkpoint_has_one_history() -> None:
    series = {
        (1, 0): [(1, 9.0), (2, 8.0), (3, math.nan), (4, 6.0)],
        (1, 1): [(1, 0.0)],
        (2, 1): [(3, 7.5), (4, 6.5), (5, 5.5)],
    }
    points = merged(series)
    assert [(point.step, point.value) for point in points] == [(1, 9.0), (2, 8.0), (3, 7.5), (4, 6.5), (5, 5.5)]
    assert best_of(points, 1, 3) == 7.5
    assert best_of(points, -1) == 9.0
    assert merged({(1, 0): [(1, math.inf)]}) == ()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.sampled_from([1, -1]))
def test_a_thinned_history_keeps_its_ends_and_its_best(values: list[float], sign: int) -> None:
    points = [Point(step, value) for step, value in enumerate(values)]
    kept = thinned(points, sign)
    assert len(kept) <= MOST_KEPT
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert best_of(kept, sign) == best_of(points, sign)
