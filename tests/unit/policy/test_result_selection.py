"""Which outputs come home, by the job's own rule."""

from __future__ import annotations

import pytest

from ugro.kernel.files.rules import Selection, choose, is_being_written
from ugro.kernel.jobs.model import ResultRule
from ugro.node.files.listing import RunFile

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
    choice = choose(CHECKPOINTS, Selection(ResultRule(rule)))
    assert names(choice.wanted) == wanted
    assert {one.file.name for one in choice.left} == {one.name for one in CHECKPOINTS} - {n.encode() for n in wanted}
    assert all(one.reason == f"results.checkpoints is {rule}" for one in choice.left)


def test_where_none_is_called_best_the_newest_is() -> None:
    assert names(choose(CHECKPOINTS[:3], Selection(ResultRule("best"))).wanted) == ["checkpoints/step_100/weights"]


def test_checkpoints_without_a_number_are_older_than_those_with_one() -> None:
    found = [file("checkpoints/last.pt", changed_ns=9), file("checkpoints/epoch-3.pt", changed_ns=1)]
    assert names(choose(found, Selection(ResultRule("last 1"))).wanted) == ["checkpoints/epoch-3.pt"]


def test_under_a_limit_the_small_files_come_first() -> None:
    found = [file("big", 100), file("small", 1), file("middle", 10)]
    choice = choose(found, Selection(ResultRule(limit_bytes=20)))
    assert names(choice.wanted) == ["small", "middle"]
    assert [(one.file.name, one.reason) for one in choice.left] == [(b"big", "over results.limit, 20 B")]


def made(name: str, size: int = 1) -> RunFile:
    """In the working directory, without anybody asking for it."""
    return file(name, size)._replace(is_work=True)


def test_files_of_the_working_directory_have_a_limit_of_their_own() -> None:
    found = [made("big", 30), file("asked", 30), made("small", 10), made("middle", 15)]
    choice = choose(found, Selection(ResultRule(workdir_limit_bytes=25)))
    assert names(choice.wanted) == ["asked", "small", "middle"]
    assert [(one.file.name, one.reason) for one in choice.left] == [(b"big", "over results.workdir_limit, 25 B")]
    assert names(choose(found, Selection(ResultRule(workdir_limit_bytes=None))).wanted) == names(tuple(found))


def test_what_an_ignore_file_names_is_left_unless_somebody_asked_for_it() -> None:
    found = [made("a.log"), file("b.log"), made("c.csv")]
    by = Selection(named_by=lambda name: ".gitignore" if name.endswith(b".log") else None)
    choice = choose(found, by)
    assert names(choice.wanted) == ["b.log", "c.csv"]
    assert [(one.file.name, one.reason) for one in choice.left] == [(b"a.log", "named by .gitignore")]


def test_the_folder_of_the_checkpoints_is_the_one_the_job_names() -> None:
    found = [file("ckpt/run/step_1"), file("ckpt/run/step_2"), file("checkpoints/step_1")]
    choice = choose(found, Selection(ResultRule("last 1"), "ckpt/run"))
    assert names(choice.wanted) == ["ckpt/run/step_2", "checkpoints/step_1"]


def test_a_file_that_is_only_here_is_dropped_by_the_rule_for_checkpoints_but_by_no_limit() -> None:
    by = Selection(ResultRule("last 1", limit_bytes=5))
    choice = choose([file("checkpoints/step_2")], by, [file("checkpoints/step_1"), file("only_here", 100)])
    assert choice.outdated == (b"checkpoints/step_1",)
    assert choice.left == ()


def test_what_cannot_be_sent_is_told_and_not_wanted() -> None:
    choice = choose([file("link", problem="a symbolic link"), file("a")], Selection(ResultRule()))
    assert (names(choice.wanted), names(choice.unsendable)) == (["a"], ["link"])


def test_a_large_file_that_changed_just_now_is_left_alone_while_the_run_lives() -> None:
    now = 100_000_000_000
    assert is_being_written(file("weights", 64 * MIB, now - 1_000_000), "checkpoints", now)
    assert not is_being_written(file("weights", 64 * MIB, now - 10_000_000_000), "checkpoints", now)
    assert not is_being_written(file("metrics.jsonl", 100, now), "checkpoints", now)
    assert is_being_written(file("checkpoints/step_3.tmp/part"), "checkpoints", now)
    assert not is_being_written(file("checkpoints/step_3/part.tmp"), "checkpoints", now)


def test_a_file_that_would_replace_another_here_is_left_whether_that_is_a_file_or_a_folder() -> None:
    found = [file("checkpoints/best"), file("checkpoints/step_1/weights"), file("plots"), file("other")]
    choice = choose(found, Selection(), taken={b"checkpoints/best", b"checkpoints/step_1", b"plots/a.png"})
    assert names(choice.wanted) == ["other"]
    assert {one.reason for one in choice.left} == {"another file of this name is here"}


@pytest.mark.parametrize("rule", ["last 1", "best"])
def test_one_that_was_never_completed_does_not_take_the_place_of_one_that_was(rule: str) -> None:
    found = [file("checkpoints/step_2.pt"), file("checkpoints/step_3.pt.tmp")]
    choice = choose(found, Selection(ResultRule(rule)))
    assert names(choice.wanted) == ["checkpoints/step_2.pt"]
    assert names(choose(found, Selection(ResultRule("all"))).wanted) == names(tuple(found))
