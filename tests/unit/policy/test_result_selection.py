"""Which outputs come home, by the job's own rule."""

from __future__ import annotations

import pytest

from ugro.core.job import ResultRule
from ugro.policy.result_selection import choose, is_being_written
from ugro.remote.files.listing import RunFile

MIB = 1 << 20


def file(name: str, size: int = 1, changed_ns: int = 0, problem: str | None = None) -> RunFile:
    return RunFile(name.encode(), size, changed_ns, 1, problem)


def names(files: tuple[RunFile, ...]) -> list[str]:
    return [one.name.decode() for one in files]


CHECKPOINTS = [file(f"checkpoints/step_{step}/weights") for step in (9, 10, 100)]
CHECKPOINTS += [file("checkpoints/model_best.pt"), file("metrics.jsonl")]


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("all", [one.name.decode() for one in CHECKPOINTS]),
        ("none", ["metrics.jsonl"]),
        ("best", ["checkpoints/model_best.pt", "metrics.jsonl"]),
        ("last 1", ["checkpoints/step_100/weights", "metrics.jsonl"]),
        ("last 2", ["checkpoints/step_10/weights", "checkpoints/step_100/weights", "metrics.jsonl"]),
        ("last 9", [one.name.decode() for one in CHECKPOINTS]),
    ],
)
def test_the_rule_chooses_among_checkpoints_and_nothing_else(rule: str, wanted: list[str]) -> None:
    choice = choose(CHECKPOINTS, ResultRule(rule))
    assert names(choice.wanted) == wanted
    assert {one.file.name for one in choice.left} == {one.name for one in CHECKPOINTS} - {n.encode() for n in wanted}
    assert all(one.reason == f"results.checkpoints is {rule}" for one in choice.left)


def test_where_none_is_called_best_the_newest_is() -> None:
    assert names(choose(CHECKPOINTS[:3], ResultRule("best")).wanted) == ["checkpoints/step_100/weights"]


def test_checkpoints_without_a_number_are_older_than_those_with_one() -> None:
    found = [file("checkpoints/last.pt", changed_ns=9), file("checkpoints/epoch-3.pt", changed_ns=1)]
    assert names(choose(found, ResultRule("last 1")).wanted) == ["checkpoints/epoch-3.pt"]


def test_under_a_limit_the_small_files_come_first() -> None:
    found = [file("big", 100), file("small", 1), file("middle", 10)]
    choice = choose(found, ResultRule(limit_bytes=20))
    assert names(choice.wanted) == ["small", "middle"]
    assert [(one.file.name, one.reason) for one in choice.left] == [(b"big", "over the limit of 20 B")]


def test_what_cannot_be_sent_is_told_and_not_wanted() -> None:
    choice = choose([file("link", problem="a symbolic link"), file("a")], ResultRule())
    assert (names(choice.wanted), names(choice.unsendable)) == (["a"], ["link"])


def test_a_large_file_that_changed_just_now_is_left_alone_while_the_run_lives() -> None:
    now = 100_000_000_000
    assert is_being_written(file("weights", 64 * MIB, now - 1_000_000), now)
    assert not is_being_written(file("weights", 64 * MIB, now - 10_000_000_000), now)
    assert not is_being_written(file("metrics.jsonl", 100, now), now)
    assert is_being_written(file("checkpoints/step_3.tmp/part"), now)
    assert not is_being_written(file("checkpoints/step_3/part.tmp"), now)
