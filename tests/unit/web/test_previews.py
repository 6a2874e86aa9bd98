"""What is shown of files that jobs wrote, some of which mean harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.web.pages.outputs import HEAD_BYTES, MOST_ROWS, Preview, attachment, image_type, preview, visible

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def _of(name: str, content: bytes) -> Preview:
    return preview(name, content[:HEAD_BYTES], len(content))


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a..", "image/gif"),
        (b"RIFF\x01\x02\n\x04WEBPVP8 ", "image/webp"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'>", None),
        (b"<!doctype html>", None),
        (b"%PDF-1.7", None),
        (b" \x89PNG\r\n\x1a\n", None),
    ],
)
def test_only_what_begins_like_an_image_is_one(head: bytes, kind: str | None) -> None:
    assert image_type(head) == kind


@pytest.mark.parametrize("name", ["picture.svg", "page.html", "page.png", "x.js", "Makefile"])
def test_markup_is_text_whatever_it_is_called(name: str) -> None:
    found = _of(name, b"<svg onload=alert(1)><script>alert(2)</script></svg>")
    assert found == Preview("text", "<svg onload=alert(1)><script>alert(2)</script></svg>")


def test_an_image_is_known_by_its_content() -> None:
    assert _of("picture.txt", PNG).kind == "image"
    assert _of("model.pt", b"PK\x03\x04" + bytes(50)).kind == "other"
    assert _of("empty.png", b"").kind == "empty"


def test_a_table_has_its_first_rows_and_says_so() -> None:
    rows = "".join(f"{at},{at * 2}\n" for at in range(MOST_ROWS + 50))
    found = _of("a.csv", f"step,loss\n{rows}".encode())
    assert (found.kind, found.header, len(found.rows)) == ("table", ("step", "loss"), MOST_ROWS)
    assert found.rows[3] == ("3", "6")
    assert "first 200 rows" in found.note
    assert _of("a.csv", b"a,b\n1,2\n").note == ""


def test_tables_have_the_delimiters_of_their_makers() -> None:
    assert _of("a.tsv", b"a\tb\n1\t2\n").rows == (("1", "2"),)
    assert _of("a.csv", b"a;b\n1,5;2\n").rows == (("1,5", "2"),)
    assert _of("a.csv", b'a,b\n"x,y",2\n').rows == (("x,y", "2"),)


def test_json_is_indented_and_what_is_no_json_is_text() -> None:
    assert json.loads(_of("a.json", b'{"b": [1, 2]}').text) == {"b": [1, 2]}
    assert "\n" in _of("a.json", b'{"b": [1, 2]}').text
    assert _of("a.json", b"{not json").kind == "text"
    assert _of("a.json", b"[" * 100_000).kind == "text", "it is not followed into the depth"


def test_metrics_are_a_table_with_a_column_for_each_value() -> None:
    lines = b'{"step": 1, "values": {"loss": 0.5}}\n{"step": 2, "values": {"loss": 0.25, "lr": 1e-3}}\n'
    found = _of("metrics.jsonl", lines)
    assert (found.header, found.rows) == (("step", "loss", "lr"), (("1", "0.5", ""), ("2", "0.25", "0.001")))
    assert _of("metrics.jsonl", b"[1]\nno\n").kind == "text"


def test_of_a_large_file_the_beginning_is_shown_and_no_half_line_of_a_table() -> None:
    found = _of("a.txt", b"x" * (HEAD_BYTES + 1))
    assert (found.kind, len(found.text)) == ("text", HEAD_BYTES)
    wide = b"a,b\n" + b"".join(b"%d,%s\n" % (at, b"y" * 5000) for at in range(100))
    assert {len(row) for row in _of("a.csv", wide).rows} == {2}
    assert _of("ä.txt", ("ä" * HEAD_BYTES).encode()).kind == "text", "a character may be cut"


def test_text_that_is_not_utf8_is_shown_and_binary_is_not() -> None:
    assert _of("a.log", "Größe passt, und alles ist gut hier\n".encode("latin-1")).kind == "text"
    assert _of("a.bin", bytes(range(128, 256)) * 4).kind == "other"


def test_nothing_in_a_text_can_hide_or_turn_around_what_follows() -> None:
    assert visible("a\x1b[31m\tb\r\nc\u202ed") == "a\\x1b[31m\tb\nc\\u202ed"


@given(st.text(), st.binary())
def test_any_name_and_any_content_have_a_preview(name: str, content: bytes) -> None:
    for ending in ("", ".csv", ".json", ".jsonl", ".tsv"):
        assert _of(name + ending, content).kind


@given(st.text())
def test_no_name_leaves_its_header(name: str) -> None:
    header = attachment(name)
    header.encode("ascii")
    assert "\n" not in header
    assert "\r" not in header
    assert header.count('"') == 2
    assert header.startswith("attachment;")


def test_json_that_grows_when_it_is_indented_is_text() -> None:
    """A quarter of a megabyte would have been 200."""
    content = ("[" * 900 + ",".join("1" * 100_000) + "]" * 900).encode()
    found = _of("deep.json", content)
    assert found.kind == "text"
    assert len(found.text) == len(content)
    assert _of("wide.json", json.dumps(list(range(20_000))).encode()).kind == "json"
