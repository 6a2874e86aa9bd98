"""Rows of local files: text, CSV, JSON lines and Parquet. Every complaint names the file and the place in it."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from ugro.core.errors import NotFound, UsageError

Row = dict[str, Any]

TEXTS = frozenset({".txt", ".text", ".md"})
TABLES = frozenset({".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet"})
STARTS = "starts"  # in rows of text files: whether a document starts with this row

_SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "eval": "validation", "test": "test",
}  # fmt: skip
_LONGEST_FIELD = 1 << 30
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TEXT_PIECE = 1 << 16  # characters of a row of a text file, about: a tokenizer takes many of them at once


def splits(place: Path, suffixes: frozenset[str]) -> dict[str, list[Path]]:
    """The files by split, which the name of a file or of its folder says; all others are for training."""
    if not place.exists():
        raise NotFound(f"no file or folder {place}")
    if place.is_file():
        _check_suffix(place, suffixes)
        return {"train": [place]}
    found: dict[str, list[Path]] = {}
    for path in sorted(place.rglob("*")):
        relative = path.relative_to(place)
        is_hidden = any(part.startswith((".", "_")) for part in relative.parts)
        if path.is_file() and path.suffix.lower() in suffixes and not is_hidden and not _is_readme(path):
            found.setdefault(split_of(relative), []).append(path)
    if not found:
        raise UsageError(f"{place}: no file in it that can be read", hint=f"it may have: {_listed(suffixes)}")
    if "train" not in found:
        raise UsageError(f"{place}: files for {' and '.join(found)}, none for training")
    return found


def split_of(relative: Path) -> str:
    return named_split(relative) or "train"


def named_split(relative: Path) -> str | None:
    """None if neither its name nor that of its folder says one."""
    for part in (*relative.parts[:-1], relative.stem):
        word = re.match(r"[a-z]+", part.lower())
        if word and word[0] in _SPLITS and not re.match(r"[a-z]", part.lower()[word.end() :]):
            return _SPLITS[word[0]]
    return None


def rows(paths: Iterable[Path]) -> Iterator[Row]:
    for path in paths:
        yield from _READERS.get(path.suffix.lower(), _text)(path)


def _check_suffix(path: Path, suffixes: frozenset[str]) -> None:
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{path}: a file of this kind cannot be read", hint=f"it may be: {_listed(suffixes)}")


def _is_readme(path: Path) -> bool:
    return path.stem.upper() in {"README", "LICENSE"}


def _listed(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted(suffixes))


# --- kinds of files ---------------------------------------------------------------------------------------------


def _lines(path: Path) -> Generator[str]:
    """Decoded line by line, so that a byte that is not UTF-8 can be named. A byte order mark is no text."""
    position = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise UsageError(
                        f"{path}, line {number}: not UTF-8 (byte {position + error.start})",
                        hint=f"convert it: iconv -f {_guess(line)} -t UTF-8 {path.name} > new{path.suffix}",
                    ) from None
                position += len(line)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def _guess(line: bytes) -> str:
    return "UTF-16" if line[:2] in (b"\xff\xfe", b"\xfe\xff") else "ISO-8859-1"


def _text(path: Path) -> Iterator[Row]:
    """A file is one document, in pieces that end with lines."""
    piece: list[str] = []
    length, is_first = 0, True
    for line in _lines(path):
        piece.append(line)
        length += len(line)
        if length >= _TEXT_PIECE:
            yield {"text": "".join(piece), STARTS: is_first}
            piece, length, is_first = [], 0, False
    if length:
        yield {"text": "".join(piece), STARTS: is_first}


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with closing(_lines(path)) as lines:  # also when a mistake ends the reading: the error would keep the file open
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    wanted = len(reader.fieldnames or ())
                    raise UsageError(f"{path}, line {reader.line_num}: not {wanted} columns, as the first line has")
                yield dict(row)
        except csv.Error as error:
            raise UsageError(f"{path}, line {reader.reader.line_num}: {error}") from error


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, or an object per line."""
    with closing(_lines(path)) as lines:
        numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
        first = next(numbered, None)
        if first is None:
            return
        if first[1].lstrip().startswith("["):
            rest = "".join(line for _, line in numbered)
            yield from _checked(path, _parsed(path, first[0], first[1] + rest), first[0])
            return
        for number, line in itertools.chain([first], numbered):
            yield from _checked(path, [_parsed(path, number, line)], number)


def _parsed(path: Path, number: int, text: str) -> Any:
    try:
        found = json.loads(text)
        if _SURROGATE.search(text):  # as an escape: half of a pair is no text, and tokenizers fail with it
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}: not JSON: {error}", hint="one object per line, or a list") from None


def _checked(path: Path, values: Any, number: int) -> Iterator[Row]:
    for value in values:
        if not isinstance(value, dict):
            raise UsageError(f"{path}, line {number}: a {type(value).__name__}, not an object with columns")
        yield value


def _parquet(path: Path) -> Iterator[Row]:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                yield from batch.to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: cannot be read as Parquet: {error}") from error


_READERS = {
    ".csv": _csv, ".tsv": _csv, ".json": _json, ".jsonl": _json, ".ndjson": _json, ".parquet": _parquet,
}  # fmt: skip
