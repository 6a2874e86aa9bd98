"""How far a training is, and how long it still takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import process_time

import pytest

from ugro.features.training.rules_headline import (
    Known,
    Track,
    mean_seconds_per_step,
    newest_bar,
    progress,
    seconds_per_step,
)

_NOW = 1_000_000.0
_BAR = "Train:  45%|████▌     | 450/1000 [01:02<01:15,  7.2it/s]"


def _steps(count: int, pace_s: float = 2.0, first: int = 1) -> Track:
    """One record for each step, the last of them now."""
    times = [_NOW - pace_s * (count - 1 - at) for at in range(count)]
    return Track(list(range(first, first + count)), times, count=count)


def _with_pauses(pauses: dict[int, float], count: int = 40) -> Track:
    """A step a second, but longer before some steps."""
    times, at = [], 0.0
    for step in range(count):
        at += pauses.get(step, 1.0)
        times.append(at)
    return Track(list(range(count)), times, count=count)


def _epochs(values: Sequence[float], steps_each: int = 10, pace_s: float = 2.0) -> Track:
    count = len(values)
    times = [_NOW - pace_s * steps_each * (count - 1 - at) for at in range(count)]
    return Track([steps_each * at for at in range(count)], times, values, count=count)


def test_the_training_s_own_total_comes_first_and_steps_from_zero_count_one_more() -> None:
    known = Known(_NOW, _steps(50, first=0), told={"progress/total_steps": 200}, parameters={"max_steps": "999"})
    found = progress(replace(known, is_from_zero=True))

    assert found is not None
    assert (found.words, found.left_words, found.share) == ("step 50 of 200", "5m left", 0.25)
    assert found.left_s == pytest.approx(300)


@pytest.mark.parametrize(
    ("told", "parameters", "source"),
    [
        ({"max_steps": 100.0}, {}, "metric max_steps"),
        ({}, {"max-steps": "100"}, "argument max-steps"),
        ({}, {"trainer.max_steps": "100"}, "argument trainer.max_steps"),
        ({}, {"env.MAX_ITERS": "100"}, "argument env.MAX_ITERS"),
        ({}, {"steps": "100"}, "argument steps"),
        ({"progress/steps_per_epoch": 20.0}, {"epochs": "5"}, "argument epochs"),
    ],
)
def test_a_total_is_found_where_a_training_tells_it(
    told: dict[str, float], parameters: dict[str, str], source: str
) -> None:
    found = progress(Known(_NOW, _steps(10), told=told, parameters=parameters))

    assert found is not None
    assert (found.words, found.total, found.source) == ("step 10 of 100", 100, source)


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_steps": "-1"},
        {"steps": "5"},
        {"save-steps": "500"},
        {"steps": "500", "epochs": "3"},
        {"max_steps": "many"},
    ],
)
def test_a_number_that_is_no_total_is_not_taken_for_one(parameters: dict[str, str]) -> None:
    found = progress(Known(_NOW, _steps(1200), parameters=parameters))

    assert found is not None
    assert (found.words, found.left_words, found.share) == ("step 1,200", "total not known", None)


def test_without_any_step_nothing_is_said() -> None:
    assert progress(Known(_NOW, parameters={"max_steps": "100"})) is None
    early = progress(Known(_NOW, _steps(1), parameters={"max_steps": "100"}))
    assert early is not None
    assert (early.words, early.left_words) == ("step 1 of 100", "time left not known yet")


def test_the_speed_is_the_recent_one_without_a_pause_that_came_once() -> None:
    steady = seconds_per_step(_with_pauses({}))
    assert steady == pytest.approx(1)
    assert seconds_per_step(_with_pauses({30: 3600.0})) == pytest.approx(1)
    saving = {step: 11.0 for step in range(0, 40, 5)}
    assert seconds_per_step(_with_pauses(saving)) == pytest.approx(3), "what recurs will come again"
    slow_start = {step: 60.0 for step in range(15)}
    assert seconds_per_step(_with_pauses(slow_start)) == pytest.approx(1)


def test_a_training_that_stands_still_says_so_instead_of_a_time() -> None:
    known = Known(_NOW + 600, _steps(50), told={"max_steps": 200})
    found = progress(known)

    assert found is not None
    assert (found.left_words, found.left_s, found.stalled_s) == ("no step for 10m", None, 600)
    slow = progress(Known(_NOW + 600, _steps(50, pace_s=300.0), told={"max_steps": 200}))
    assert slow is not None
    assert slow.left_s is not None, "steps of five minutes are seldom, not missing"


def test_records_without_times_have_no_speed() -> None:
    found = progress(Known(_NOW, Track([1, 2, 3], [0.0, 0.0, 0.0], count=3), told={"max_steps": 10}))
    assert found is not None
    assert (found.words, found.left_words) == ("step 3 of 10", "time left not known yet")


def _batches(sizes: Sequence[int], every_s: float = 2.0) -> Track:
    """Records without times, which have those of their arrival."""
    times = [_NOW - every_s * (len(sizes) - 1 - at) for at, size in enumerate(sizes) for _ in range(size)]
    return Track(list(range(1, len(times) + 1)), times, count=len(times))


def test_steps_that_arrive_in_batches_share_the_time_since_the_batch_before() -> None:
    assert seconds_per_step(_batches([10, 10, 10, 10])) == pytest.approx(0.2)
    assert seconds_per_step(_batches([40, 9, 11, 10, 10])) == pytest.approx(0.2), "how many came first says nothing"
    found = progress(Known(_NOW, _batches([10, 10, 10, 10]), told={"max_steps": 100}))
    assert found is not None
    assert found.left_s == pytest.approx(12)
    early = progress(Known(_NOW, _batches([25, 5]), told={"max_steps": 100}))
    assert early is not None
    assert early.left_words == "time left not known yet", "one interval tells nothing"


def test_a_whole_attempt_has_a_mean_pace_where_batches_say_too_little() -> None:
    assert mean_seconds_per_step(_batches([40]), 8.9) == pytest.approx(8.9 / 40)
    assert mean_seconds_per_step(Track([50, 100], [_NOW, _NOW]), 10.0) == pytest.approx(0.1), "every 50th is logged"
    assert mean_seconds_per_step(Track([501, 502, 601], [_NOW] * 3), 10.0) == pytest.approx(0.1), "it resumed"
    assert mean_seconds_per_step(_steps(2), 10.0) is None, "they have times of their own"
    assert mean_seconds_per_step(_batches([1]), 10.0) is None
    assert mean_seconds_per_step(_batches([40]), 0.0) is None


def test_what_has_succeeded_is_done_though_it_did_not_log_its_last_step() -> None:
    known = Known(_NOW, _steps(98), told={"max_steps": 100}, is_final=True)
    failed, succeeded = progress(known), progress(replace(known, has_succeeded=True))
    assert failed is not None
    assert succeeded is not None
    assert (failed.words, failed.share) == ("step 98 of 100", 0.98)
    assert (succeeded.words, succeeded.share) == ("done, last logged step 98 of 100", 1.0)
    whole = progress(replace(known, steps=_steps(100), has_succeeded=True))
    assert whole is not None
    assert (whole.words, whole.share) == ("step 100 of 100", 1.0)


def test_a_time_limit_that_comes_first_is_said() -> None:
    known = Known(_NOW, _steps(100), told={"max_steps": 5500}, limit_left_s=7200)
    found = progress(known)
    assert found is not None
    assert (found.left_words, found.left_s) == ("needs 3h, and its time limit leaves 2h", 10800)
    enough = progress(replace(known, limit_left_s=10801))
    assert enough is not None
    assert enough.left_words == "3h left"
    bar = progress(Known(_NOW, log_tail=_BAR, limit_left_s=60.0))
    assert bar is not None
    assert bar.left_words == "needs 1m15s, and its time limit leaves 1m"


def test_a_bar_knows_the_time_where_records_do_not() -> None:
    untimed = Track([1, 2, 3], [_NOW, _NOW, _NOW], count=3)
    found = progress(Known(_NOW, untimed, told={"max_steps": 1000}, log_tail=_BAR))
    assert found is not None
    assert (found.words, found.left_s) == ("Train: 450 of 1,000", 75)


def test_epochs_that_have_parts_are_progress_themselves() -> None:
    known = Known(_NOW, _steps(31), epochs=_epochs([0.25, 0.5, 0.75, 1.0, 1.25]), parameters={"epochs": "3"})
    found = progress(known)

    assert found is not None
    assert found.words == "epoch 1.25 of 3"
    assert found.left_s == pytest.approx(7 * 20)


def test_whole_epochs_need_one_that_is_over_before_the_time_left_is_known() -> None:
    in_first = Known(_NOW, _steps(30), epochs=_epochs([0, 0, 0]), parameters={"epochs": "4"})
    found = progress(in_first)
    assert found is not None
    assert (found.words, found.left_words) == ("epoch 1 of 4, step 30", "time left not known yet")

    in_second = progress(Known(_NOW, _steps(30), epochs=_epochs([0, 0, 1]), parameters={"epochs": "4"}))
    assert in_second is not None
    assert in_second.words == "epoch 2 of 4, step 30"
    assert in_second.left_s == pytest.approx(50 * 2), "80 steps in all"

    at_ends = progress(Known(_NOW, _steps(3), epochs=_epochs([1, 2, 3]), parameters={"epochs": "4"}))
    assert at_ends is not None
    assert (at_ends.words, at_ends.share) == ("epoch 3 of 4, step 3", 0.75)



@pytest.mark.parametrize(
    ("log", "words", "left", "left_s"),
    [
        (f"\r{_BAR}", "Train: 450 of 1,000", "1m15s left", 75),
        ("  0%|          | 0/1000 [00:00<?, ?it/s]", "0 of 1,000", "time left not known yet", None),
        (
            "Epoch 3:  45%|███ | 450/1000 [01:02<01:15, 7.2it/s]",
            "Epoch 3: 450 of 1,000",
            "1m15s left of this part",
            None,
        ),
        (f"{_BAR}\r\x1b[A100%|███| 5/5 [00:01<00:00, 5it/s]\n", "Train: 450 of 1,000", "1m15s left", 75),
        ("50%|█ | 1.5k/3.0k [1:00:00<1:00:00, 1it/s]", "1,500 of 3,000", "1h left", 3600),
    ],
)
def test_a_bar_in_the_log_is_the_last_resort(log: str, words: str, left: str, left_s: float | None) -> None:
    found = progress(Known(_NOW, log_tail=f"noise 7 of 9\n{log}"))

    assert found is not None
    assert (found.words, found.left_words, found.left_s) == (words, left, left_s)
    told = progress(Known(_NOW, _steps(3), told={"max_steps": 10}, log_tail=log))
    assert told is not None
    assert told.words == "step 3 of 10"


@pytest.mark.parametrize(
    "log", ["", "100 % done", "7/9", "45%|███ no numbers", "45%|█| x/y [z<z]", "9%|█| 20/10 [00:01<00:01"]
)
def test_what_is_no_bar_is_none(log: str) -> None:
    assert progress(Known(_NOW, log_tail=log)) is None


@pytest.mark.parametrize(
    "line", [" " * 8192, ": " * 4096, "1" * 8192, "1%|x|" + "1" * 8000, "1%|x|" + "1." * 4000, "1%|x|" * 1600]
)
def test_a_long_line_without_a_bar_takes_no_time(line: str) -> None:
    begin = process_time()
    assert progress(Known(_NOW, log_tail=line)) is None
    assert process_time() - begin < 5  # it took hours


@pytest.mark.parametrize(
    "known",
    [
        Known(_NOW, parameters={"max_steps": "1e400"}),
        Known(_NOW, parameters={"epochs": "1e400"}, epochs=_epochs([0, 0, 1, 1])),
        Known(_NOW, told={"max_steps": 1e300}),
        Known(_NOW, told={"max_epochs": 1e300}, epochs=_epochs([0, 0, 1, 1])),
        Known(_NOW, told={"progress/steps_per_epoch": 1e14}, parameters={"epochs": "1e14"}),
    ],
)
def test_a_total_beyond_all_measure_is_none(known: Known) -> None:
    found = progress(replace(known, steps=_steps(50)))
    assert found is not None
    assert (found.words, found.left_words) == ("step 50", "total not known")


def test_a_bar_with_an_endless_time_is_none() -> None:
    assert progress(Known(_NOW, log_tail=f"1%|x| 1/2 [{'1' * 5000}<0")) is None


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("Train:  45%|█ | 450/1000 [01:02<01:15]", "Train"),
        ("Epoch 3:  45%|█ | 450/1000 [01:02<01:15]", "Epoch 3"),
        ("done |Train:45%|█ | 450/1000 [01:02<01:15]", "Train"),
        (" 45%|█ | 450/1000 [01:02<01:15]", ""),
    ],
)
def test_a_bar_has_the_name_before_it(line: str, what: str) -> None:
    found = newest_bar(line)
    assert found is not None
    assert found.what == what


def test_a_bar_that_is_over_is_not_the_training_s() -> None:
    over = "Downloading: 100%|█| 10/10 [09:00<00:00, 2it/s]\n"
    assert progress(Known(_NOW, log_tail=over)) is None
    stepping = progress(Known(_NOW, _steps(3), log_tail=f"100%|█| 10/10 [09:00<00:00, 2it/s]\n{over}"))
    assert stepping is not None
    assert stepping.words == "step 3"
    both = progress(Known(_NOW, log_tail=f"{over}{_BAR}"))
    assert both is not None
    assert both.words == "Train: 450 of 1,000"


def test_an_ended_job_has_no_time_left() -> None:
    found = progress(Known(_NOW + 10**6, _steps(50), told={"max_steps": 200}, log_tail=_BAR, is_final=True))
    assert found is not None
    assert (found.words, found.left_words, found.stalled_s) == ("step 50 of 200", "", None)
