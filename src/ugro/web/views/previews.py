"""What a preview shows of a file that a job wrote: an image, a table, JSON, text, or only its size.

The content decides, not the name alone, and it is never markup: HTML and SVG are text here.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

HEAD_BYTES = 256 * 1024
MOST_ROWS = 200
_MOST_COLUMNS = 50
_LONGEST_CELL = 300
_LARGEST_IMAGE = 20 << 20
_LONGEST_JSON = 8 * HEAD_BYTES  # indented
_MOST_UNREADABLE = 0.1  # of the characters of a text
_IMAGES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Control characters, and those that turn the direction of what follows.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

Kind = Literal["image", "table", "json", "text", "other", "empty"]


@dataclass(frozen=True, slots=True)
class Preview:
    kind: Kind
    text: str = ""
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""  # what is not shown


def image_type(head: bytes) -> str | None:
    """The media type of an image that a browser may draw, by its first bytes."""
    return next((kind for pattern, kind in _IMAGES if pattern.match(head)), None)


def preview(name: str, head: bytes, size: int) -> Preview:
    """``head``: the first ``HEAD_BYTES`` of the file, or all of it."""
    if not size:
        return Preview("empty")
    if image_type(head) is not None:
        return Preview("image") if size <= _LARGEST_IMAGE else Preview("other", note="the image is too large to show")
    text = _text(head)
    if text is None:
        return Preview("other")
    is_cut = len(head) < size
    ending = re.search(r"\.[^.]*$", name.lower())
    found = _structured(ending[0] if ending else "", text, is_cut=is_cut)
    return found or Preview("text", visible(text))


def visible(text: str) -> str:
    """Text in which nothing is invisible, except line breaks and tabs."""
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def _text(head: bytes) -> str | None:
    if b"\0" in head:
        return None
    try:
        return head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start >= len(head) - 3:  # a character that the end cuts
            return head[: error.start].decode("utf-8")
    text = head.decode("utf-8", "replace")
    return text if text.count("\ufffd") <= _MOST_UNREADABLE * len(text) else None


def _structured(ending: str, text: str, *, is_cut: bool) -> Preview | None:
    # A parser that a hostile file makes fail, or recurse too deep, leaves it as text.
    try:
        if ending in _DELIMITERS:
            return _table(_whole_lines(text, is_cut=is_cut), _DELIMITERS[ending])
        if ending == ".json" and not is_cut:
            return Preview("json", visible(_indented(json.loads(text))))
        if ending in (".jsonl", ".ndjson"):
            return _records(_whole_lines(text, is_cut=is_cut))
    except (csv.Error, ValueError, RecursionError):
        pass
    return None


def _indented(document: Any) -> str:
    """Raises ValueError if that is far longer than the file: many values, each deep inside."""
    found, length = [], 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(document):
        found.append(part)
        length += len(part)
        if length > _LONGEST_JSON:
            raise ValueError("too long")
    return "".join(found)


def _whole_lines(text: str, *, is_cut: bool) -> list[str]:
    lines = text.splitlines()
    return lines[:-1] if is_cut and len(lines) > 1 else lines


def _table(lines: Sequence[str], delimiter: str) -> Preview | None:
    if delimiter == "," and lines and lines[0].count(";") > lines[0].count(","):
        delimiter = ";"
    rows = [row for row in islice(csv.reader(lines, delimiter=delimiter), MOST_ROWS + 1) if row]
    if not rows:
        return None
    header, *rest = ([_cell(value) for value in row[:_MOST_COLUMNS]] for row in rows)
    note = f"the first {MOST_ROWS} rows" if len(rest) >= MOST_ROWS else ""
    return Preview("table", header=tuple(header), rows=tuple(map(tuple, rest[:MOST_ROWS])), note=note)


def _records(lines: Iterable[str]) -> Preview | None:
    """Metrics and the like, an object on each line: a column for each of its values."""
    records = [dict(_flat(json.loads(line))) for line in islice((line for line in lines if line.strip()), MOST_ROWS)]
    header = list(dict.fromkeys(key for record in records for key in record))[:_MOST_COLUMNS]
    if not header:
        return None
    rows = tuple(tuple(record.get(key, "") for key in header) for record in records)
    note = f"the first {MOST_ROWS} records" if len(records) == MOST_ROWS else ""
    return Preview("table", header=tuple(_cell(key) for key in header), rows=rows, note=note)


def _flat(record: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(record, dict):
        raise ValueError("not an object")
    for key, value in record.items():
        if key == "values" and isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, _cell(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _cell(value: str) -> str:
    return visible(value if len(value) <= _LONGEST_CELL else f"{value[:_LONGEST_CELL]}…")
