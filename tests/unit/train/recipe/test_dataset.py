"""Which rows are trained and evaluated on, which columns count, and what the classes are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.support.errors import NotFound, UsageError
from ugro.train.recipe import dataset
from ugro.train.recipe.command_line import MODEL_FOLDER, Named, Recipe
from ugro.train.recipe.dataset import LocalTable, Table
from ugro.train.recipe.inputs import Labels

NAMED = Named("data", "data", True, {})


def table(folder: Path, content: str, name: str = "a.csv") -> Table:
    (folder / name).write_text(content)
    return LocalTable([folder / name])


def found(folder: Path, *splits: str) -> dict[str, Table]:
    return {name: table(folder, "text\nx\n", f"{name}.csv") for name in splits}


@pytest.mark.parametrize(
    ("splits", "wanted", "evaluated", "held_out"),
    [
        (("train", "validation", "test"), "auto", "validation", 0.0),
        (("train", "test"), "auto", "test", 0.0),
        (("train",), "auto", None, 0.05),
        (("train", "test"), "0.2", None, 0.2),
        (("train", "test"), "none", None, 0.0),
        (("train", "other"), "other", "other", 0.0),
        (("anything",), "auto", None, 0.05),
    ],
)
def test_what_is_evaluated_on(
    tmp_path: Path, splits: tuple[str, ...], wanted: str, evaluated: str | None, held_out: float
) -> None:
    there = found(tmp_path, *splits)
    chosen = dataset.chosen(there, NAMED, wanted)
    assert chosen.train is there[splits[0]]
    assert chosen.evaluation is (there[evaluated] if evaluated else None)
    assert chosen.held_out == held_out


@pytest.mark.parametrize("wanted", ["validaton", "1.5", "-0.1"])
def test_a_split_that_is_not_there_is_refused(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(UsageError):
        dataset.chosen(found(tmp_path, "train"), NAMED, wanted)


def test_the_table_of_short_names_says_splits_and_columns(tmp_path: Path) -> None:
    named = Named("imdb", "stanfordnlp/imdb", False, {"eval_split": "test", "text": "sentence", "label": "stars"})
    there = found(tmp_path, "train", "validation", "test")
    assert dataset.chosen(there, named, "auto").evaluation is there["test"]
    rows = table(tmp_path, "text,sentence,stars\na,b,1\n")
    assert dataset.text_column(rows, named, None) == "sentence"
    assert dataset.label_column(rows, named, None) == "stars"
    assert dataset.text_column(rows, named, "text") == "text"


def test_the_only_column_of_texts_is_the_text(tmp_path: Path) -> None:
    rows = table(tmp_path, '{"id": 3, "content": "words"}\n', "a.jsonl")
    assert dataset.text_column(rows, NAMED, None) == "content"


@pytest.mark.parametrize(
    ("content", "wanted", "words"),
    [
        ("title,body\na,b\n", None, "no column 'text'"),
        ("text\nx\n", "body", "no column 'body'"),
        ("text\n", None, "no rows"),
        ("", None, "no rows"),
    ],
)
def test_a_missing_column_is_named_with_those_there_are(
    tmp_path: Path, content: str, wanted: str | None, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        dataset.text_column(table(tmp_path, content), NAMED, wanted)
    assert words in str(caught.value)
    if content.count("\n") > 1:
        assert "columns: " in (caught.value.hint or "")


def test_a_missing_label_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no column 'label'"):
        dataset.label_column(table(tmp_path, "text,mood\na,b\n"), NAMED, None)


@given(st.integers(0, 500), st.floats(0, 0.99), st.integers(0, 9))
def test_held_out_rows_are_other_rows_and_some_are_left(count: int, part: float, seed: int) -> None:
    train, held_out = dataset.held_out(count, part, seed)
    assert sorted([*train, *held_out]) == list(range(count))
    assert (len(train), len(held_out)) == dataset_sizes(count, part)
    assert dataset.held_out(count, part, seed) == (train, held_out)


def dataset_sizes(count: int, part: float) -> tuple[int, int]:
    if part == 0 or count < 2:
        return count, 0
    held_out = min(count - 1, max(1, round(count * part)))
    return count - held_out, held_out


# --- classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "names"),
    [
        (["spam", "ham", "spam"], ["ham", "spam"]),
        ([2, 10, 1], ["1", "2", "10"]),
        (["2", "10", "1"], ["1", "2", "10"]),
        ([True, False], ["False", "True"]),
        (["--1", "-2", "-"], ["-2", "-", "--1"]),
    ],
)
def test_classes_have_one_order(seen: list[Any], names: list[str]) -> None:
    labels = Labels.of(seen, None)
    assert labels.names == names
    assert [labels.names[labels.number(value)] for value in seen] == [str(value) for value in seen]


def test_names_that_the_dataset_gives_are_kept() -> None:
    labels = Labels.of([1], ["neg", "pos"])
    assert labels.number(1) == 1
    assert labels.configuration()["id2label"] == {0: "neg", 1: "pos"}


@pytest.mark.parametrize("seen", [["same", "same"], [], [1.5, 2], [None, "a"], [["a"], "b"]])
def test_labels_that_are_none_are_refused(seen: list[Any]) -> None:
    with pytest.raises(UsageError):
        Labels.of(seen, None)


@pytest.mark.parametrize("value", ["other", None, ["a"]])
def test_a_label_that_training_did_not_have_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="not among those"):
        Labels.of(["a", "b"], None).number(value)


# --- names ------------------------------------------------------------------------------------------------------


def test_short_names_hub_ids_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODEL_FOLDER, raising=False)
    recipe = Recipe("causal-lm", {"gpt2": "openai-community/gpt2"}, {"wiki": {"path": "a/wiki", "name": "raw"}})
    assert recipe.model("gpt2").place == "openai-community/gpt2"
    assert recipe.model("openai-community/gpt2").name == "openai-community/gpt2"
    assert recipe.dataset("wiki").about_text("name") == "raw"
    assert recipe.dataset("a/wiki").about_text("name") == "raw", "its id is as good as its short name"
    assert not recipe.model("other/model").is_local
    local = recipe.model(str(tmp_path))
    assert (local.is_local, local.place, local.name) == (True, str(tmp_path), tmp_path.name)
    with pytest.raises(NotFound):
        recipe.model(str(tmp_path / "nothing"))
    monkeypatch.setenv(MODEL_FOLDER, "/somewhere/here")
    for name in ("openai-community/gpt2", "gpt2"):  # of the hub, and a folder of that name
        travelled = recipe.model(name)
        assert (travelled.name, travelled.place, travelled.is_local) == (name, "/somewhere/here", True)
