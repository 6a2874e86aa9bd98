"""Experiments as a table: what runs were told, which are meant, in what order, in what groups, page by page."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.features.experiments.rules.table import (
    Column,
    Line,
    Position,
    SortOrder,
    Spread,
    columns_at_first,
    groups_of,
    is_larger_better,
    known_columns,
    lines,
    matching,
    page,
    spread,
)
from ugro.kernel.jobs.model import JobSpec, JobState
from ugro.kernel.support.errors import UsageError
from ugro.kernel.telemetry.model import Experiment, Figure
from ugro.kernel.telemetry.rules import configuration, parameters

NOW = 2e9


def experiment(number: int, loss: float | None = None, **given: str) -> Experiment:
    figures = {} if loss is None else {"loss": Figure(loss + 1, loss, loss + 2, 100, 10)}
    return Experiment(number, "train", "ann", JobState.SUCCEEDED, 1e9 + number, 1e9, 1e9 + 60, given, figures)


def spec(*argv: str, env: Mapping[str, str] | None = None, seed: int | None = None) -> JobSpec:
    return JobSpec("train", argv, env=tuple((env or {}).items()), seed=seed)


def test_an_argument_that_is_almost_a_number_takes_no_longer_than_another() -> None:
    almost = "-" + "0" * 1_000_000 + "x"
    began_s = time.thread_time()
    assert parameters(spec("python", "train.py", "--x", almost)) == {"x": "yes"}
    assert time.thread_time() - began_s < 20, "matched again from every digit, it would take a day"


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (("python", "-u", "train.py", "--lr", "1e-3", "--epochs=3"), {"lr": "1e-3", "epochs": "3"}),
        (("python", "train.py", "--amp", "--lr", "1"), {"amp": "yes", "lr": "1"}),
        (("python", "-m", "pkg.train", "--shift", "-2.5", "--name", "a b"), {"shift": "-2.5", "name": "a b"}),
        (("./run.sh", "model.depth=12", "+data=x=y", "plain"), {"model.depth": "12", "data": "x=y"}),
        (("python", "train.py", "--api-key", "hush", "--token=hush", "--lr", "1"), {"lr": "1"}),
        (("prog", "--", "--a=", "-"), {"a": ""}),
        ((), {}),
    ],
)
def test_parameters_are_read_from_a_command_line_without_secrets(argv: tuple[str, ...], found: dict[str, str]) -> None:
    assert parameters(spec(*argv)) == found


def test_variables_and_the_seed_count_as_parameters_and_a_seed_is_no_part_of_a_configuration() -> None:
    told = parameters(spec("python", "train.py", env={"DEPTH": "3", "WANDB_API_KEY": "hush"}, seed=4))
    assert told == {"env.DEPTH": "3", "seed": "4"}
    assert parameters(spec("p", "--random_seed", "9", seed=4)) == {"random_seed": "9"}
    assert configuration(told) == (("env.DEPTH", "3"),)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", [1, 2, 3, 4]),
        ("lr>1e-3", [3, 4]),
        ("lr<=1e-3 loss<0.5", [1]),
        ("best:loss<0.5", [1, 3]),
        ("last:loss>1.5", [2]),
        ("tag:base", [2]),
        ("-tag:base state:succeeded", [1, 3, 4]),
        ("depth=12", [4]),
        ("depth!=12", [1, 2, 3]),
        ("SEED=7", []),
        ("opt=adam", [1, 2, 3, 4]),
        ("'two words'", [3]),
        ("id=2", [2]),
        ("user:bob", []),
        ("nonsense:x", []),
    ],
)
def test_a_filter_finds_by_words_tags_parameters_and_metrics(words: str, found: list[int]) -> None:
    every = [
        experiment(1, 0.3, lr="1e-3", opt="adam"),
        replace(experiment(2, 0.9, lr="0.0001", opt="adam"), tags=("base",)),
        replace(experiment(3, 0.2, lr="1e-2", opt="adam"), note="some two words here"),
        experiment(4, lr="3e-3", depth="12", opt="adam"),
    ]
    assert [one.id for one in matching(every, words, NOW)] == found


@pytest.mark.parametrize("words", ["lr>fast", "'open"])
def test_a_filter_that_means_nothing_is_said_with_an_example(words: str) -> None:
    with pytest.raises(UsageError) as caught:
        matching([experiment(1)], words, NOW)
    assert "lr>1e-4" in (caught.value.hint or "")


def test_best_is_the_least_loss_and_the_largest_accuracy() -> None:
    one = replace(experiment(1), figures={key: Figure(2.0, 1.0, 3.0, 9, 9) for key in ("loss", "val/acc", "acc_loss")})
    best = {key: Column("best", key).value(one, NOW) for key in one.figures}
    assert best == {"loss": 1.0, "val/acc": 3.0, "acc_loss": 1.0}
    assert is_larger_better("samples_per_s")


def test_a_table_begins_with_the_parameters_that_differ_and_the_most_telling_metric() -> None:
    every = [experiment(number, 0.5, lr=str(number), depth="3", seed=str(number)) for number in range(4)]
    names = [str(column) for column in columns_at_first(every)]
    assert names == ["state", "param:lr", "param:seed", "best:loss", "last:loss", "duration", "submitted", "tags"]
    assert {"param:depth", "min:loss", "note"} <= {str(column) for column in known_columns(every)}


@pytest.mark.parametrize("text", ["", "nothing", "param:", "worst:loss", "name:x"])
def test_a_column_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Column.parse(text)


VALUES = st.one_of(st.none(), st.integers(0, 3).map(str), st.sampled_from(["adam", "sgd", "sg", "ä"]))


ORDERS = st.sampled_from(["-id", "param:x", "-param:x", "best:loss", "-name"])


def with_value(number: int, value: str | None) -> Experiment:
    return experiment(number) if not value else experiment(number, len(value), x=value)


@given(st.lists(VALUES, max_size=40), ORDERS, st.integers(1, 7))
def test_pages_one_after_the_other_are_the_whole_table_and_lead_back(
    values: list[str | None], sort: str, size: int
) -> None:
    every = [with_value(at + 1, value) for at, value in enumerate(values)]
    rows, order = lines(every, ""), SortOrder.parse(sort)
    whole = [line.id for line in page(rows, order, NOW, Position(size=1000)).lines]
    seen: list[int] = []
    here = page(rows, order, NOW, Position(size=size))
    starts = []
    while here.lines:
        assert here.first == len(seen) + 1
        starts.append([line.id for line in here.lines])
        seen += starts[-1]
        if here.after is None:
            break
        here = page(rows, order, NOW, Position(after=here.after, size=size))
    assert seen == whole
    for before in reversed(starts[:-1]):
        assert here.before is not None
        here = page(rows, order, NOW, Position(before=here.before, size=size))
        assert [line.id for line in here.lines] == before
    missing = [number for number in whole if every[number - 1].parameters.get("x") is None]
    if "param:x" in sort:
        assert not missing or whole[-len(missing) :] == missing, "those without a value are last"


def test_what_comes_meanwhile_neither_repeats_nor_hides_a_line() -> None:
    every = [experiment(number, random.Random(number).random()) for number in range(1, 51)]
    order = SortOrder.parse("best:loss")
    first = page(lines(every, ""), order, NOW, Position(size=20))
    more = [*every, experiment(60, 0.0), experiment(61, 0.999)]
    second = page(lines(more, ""), order, NOW, Position(after=first.after or "", size=20))
    both = [line.id for line in (*first.lines, *second.lines)]
    assert both == [one.id for one in sorted(every, key=lambda one: one.figures["loss"].least or 0)][:40]


@pytest.mark.parametrize("cursor", ["x", "[]", "[1]", '{"a":1}', '[[1],2]', '[1,"2"]', "[1,2,3]"])
def test_a_cursor_that_is_none_is_refused(cursor: str) -> None:
    with pytest.raises(UsageError):
        page(lines([experiment(1)], ""), SortOrder(), NOW, Position(after=cursor))


def test_runs_that_differ_only_in_their_seed_are_one_line_with_mean_and_deviation() -> None:
    every = [experiment(number, loss, lr=rate, seed=str(number), depth="3") for number, loss, rate in
             ((1, 0.1, "1"), (2, 0.3, "1"), (3, 0.5, "1"), (4, 0.9, "2"))]  # fmt: skip
    found = {line.label: line for line in lines(every, "config")}
    assert list(found) == ["train: lr 2", "train: lr 1"]
    three = found["train: lr 1"]
    assert three.id == 3
    spread = three.cell(Column("best", "loss"), NOW)
    assert isinstance(spread, Spread)
    assert (round(spread.mean, 9), round(spread.deviation or 0, 9), spread.count) == (0.3, 0.2, 3)
    assert three.cell(Column("param", "lr"), NOW) == 1.0
    assert three.cell(Column("param", "seed"), NOW) != 1.0
    assert Line((every[3],)).cell(Column("best", "loss"), NOW) == 0.9
    assert groups_of(every, "lr") == {1: "lr 1", 2: "lr 1", 3: "lr 1", 4: "lr 2"}
    assert len(lines(every, "name")) == 1


@pytest.mark.parametrize("numbers", [[1.0, 3.0], [1e200, 3e200], [1.7e308, 1.7e308, -1.7e308], [0.0, 0.0]])
def test_a_group_with_huge_numbers_has_a_mean_and_a_spread(numbers: list[float]) -> None:
    found = spread(numbers)
    largest = max(map(abs, numbers)) or 1.0
    small = spread([value / largest for value in numbers])
    assert small.deviation is not None
    assert (found.mean, found.deviation) == pytest.approx((small.mean * largest, small.deviation * largest))
