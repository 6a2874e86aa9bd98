"""Local files as rows: odd ones are read right, or named with the place of the mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ugro.kernel.support.errors import NotFound, UsageError
from ugro.train.recipe import dataset as files

ALL = files.TEXTS | files.TABLES


def rows(path: Path) -> list[files.Row]:
    return list(files.rows([path]))


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_text_file_is_one_document_in_pieces_that_end_with_lines(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a long text\n" for number in range(6000))
    found = rows(written(tmp_path / "a.txt", text))
    assert "".join(row["text"] for row in found) == text
    assert len(found) > 1
    assert all(row["text"].endswith("\n") for row in found)
    assert [row[files.STARTS] for row in found] == [True] + [False] * (len(found) - 1)


def test_every_file_of_a_folder_starts_a_document(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, "words\n") for name in ("a.txt", "b.txt")]
    assert [row[files.STARTS] for row in files.rows(paths)] == [True, True]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,label\n"one, two",x\nthree,y\n'),
        ("a.tsv", "text\tlabel\none, two\tx\nthree\ty\n"),
        ("a.jsonl", '{"text": "one, two", "label": "x"}\n\n{"text": "three", "label": "y"}\n'),
        ("a.json", '[{"text": "one, two", "label": "x"},\n {"text": "three", "label": "y"}]'),
        ("a.json", '{"text": "one, two", "label": "x"}\n{"text": "three", "label": "y"}'),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_tables_of_all_kinds_have_the_same_rows(tmp_path: Path, name: str, content: str, mark: str) -> None:
    expected = [{"text": "one, two", "label": "x"}, {"text": "three", "label": "y"}]
    assert rows(written(tmp_path / name, mark + content)) == expected


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert rows(written(tmp_path / "a.txt", "\ufeffwords"))[0]["text"] == "words"


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.json"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert rows(written(tmp_path / name, "")) == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"fine\nna\xefve\n", "a.txt, line 2: not UTF-8 (byte 7)"),
        ("a.csv", b"text\nna\xefve\n", "line 2: not UTF-8"),
        ("a.csv", "text,label\none\n", "line 2: not 2 columns"),
        ("a.csv", "text,label\none,two,three\n", "line 2: not 2 columns"),
        ("a.csv", 'text,label\n"one,x\n', "line 2"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', "line 3: not JSON"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "line 2: a list, not an object"),
        ("a.json", '[1, {"text": "a"}]', "a int, not an object"),
        ("a.json", '[{"text": "a"}', "not JSON"),
        ("a.jsonl", '{"text": "a"}\n{"text": "half \\ud83d"}\n', "line 2: not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        rows(written(tmp_path / name, content))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_utf_16_is_recognised_in_the_hint(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        rows(written(tmp_path / "a.txt", "words".encode("utf-16")))
    assert "iconv -f UTF-16" in (caught.value.hint or "")


def test_splits_come_from_the_names_of_files_and_folders(tmp_path: Path) -> None:
    names = ["train.csv", "valid-00.csv", "test/a.csv", "dev/b.csv", "trained_on.csv", ".hidden.csv", "README.md"]
    for name in names:
        written(tmp_path / name, "text\nx\n")
    found = files.splits(tmp_path, ALL)
    shown = {split: [path.relative_to(tmp_path).as_posix() for path in paths] for split, paths in found.items()}
    assert shown == {
        "train": ["train.csv", "trained_on.csv"],
        "validation": ["dev/b.csv", "valid-00.csv"],
        "test": ["test/a.csv"],
    }


def test_what_cannot_be_read_is_refused_with_what_can(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        files.splits(tmp_path / "nothing", ALL)
    with pytest.raises(UsageError, match="no file in it"):
        files.splits(tmp_path, ALL)
    with pytest.raises(UsageError, match="of this kind") as caught:
        files.splits(written(tmp_path / "a.pdf", "x"), ALL)
    assert ".jsonl" in (caught.value.hint or "")
    written(tmp_path / "test.csv", "text\nx\n")
    with pytest.raises(UsageError, match="none for training"):
        files.splits(tmp_path, ALL)


def test_parquet_is_read_and_a_broken_file_is_named(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    expected = [{"text": "one", "label": 1}, {"text": "two", "label": 0}]
    parquet.write_table(arrow.Table.from_pylist(expected), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == expected
    with pytest.raises(UsageError, match="Parquet"):
        rows(written(tmp_path / "b.parquet", "no table"))


def test_a_pair_of_escapes_is_one_character(tmp_path: Path) -> None:
    assert rows(written(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude00"}'))[0]["text"] == "😀"


def test_long_fields_are_read(tmp_path: Path) -> None:
    text = "word " * 50_000
    assert rows(written(tmp_path / "a.csv", f"text\n{text}\n"))[0]["text"] == text
    assert rows(written(tmp_path / "a.jsonl", json.dumps({"text": text})))[0]["text"] == text
