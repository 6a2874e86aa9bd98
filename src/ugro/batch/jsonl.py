"""Items from a file of JSON lines, and results into one: each line with the number of its item, so that a map that was
interrupted can go on. A line is one item; lines without anything are none.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ugro.batch.errors import ItemFailed
from ugro.core.errors import NotFound, UgroError, UsageError

_HEAD_BYTES = 1 << 20
_STDIN = "-"


class Items:
    """The lines of a file, without those that are done; remembers which number each had."""

    def __init__(self, path: str, done: bytearray) -> None:
        self.path, self._done = path, done
        self._numbers: dict[int, int] = {}  # of items under way: by their place in the map
        if path != _STDIN and not Path(path).is_file():
            raise NotFound(f"there is no file {path}")

    def __iter__(self) -> Iterator[str]:
        given = number = 0
        with _opened(self.path) as file:
            for line in file:
                if not line.strip():
                    continue
                if number >= len(self._done) or not self._done[number]:
                    self._numbers[given] = number
                    given += 1
                    yield line.rstrip("\n")
                number += 1

    def number(self, place: int) -> int:
        """Asked once, when its result is there."""
        return self._numbers.pop(place)

    def count(self) -> int | None:
        """Of all lines with something in them; None: of a stream, nobody knows it."""
        if self.path == _STDIN:
            return None
        with _opened(self.path) as file:
            return sum(1 for line in file if line.strip())

    def head(self, size: int | None = None) -> tuple[int, str]:
        """The size of the file and the hash of its beginning, as it was when it had that size."""
        whole = os.path.getsize(self.path)
        with open(self.path, "rb") as file:
            content = file.read(min(_HEAD_BYTES, whole if size is None else size))
        return whole, hashlib.sha256(content).hexdigest()


class Counted:
    """An input that says its length."""

    def __init__(self, items: Items, left: int) -> None:
        self._items, self._left = items, left

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return self._left


class ResultFile:
    """Lines such as ``{"index": 3, "result": …}`` or ``{"index": 4, "error": {…}}``."""

    def __init__(self, path: str, *, resumes: bool) -> None:
        self.path = Path(path)
        self.done = bytearray()  # a byte for each item: 1 if it has a result
        if not self.path.parent.is_dir():
            raise NotFound(f"there is no folder {self.path.parent}")
        if resumes and self.path.exists():
            self._keep_results()
        elif self.path.exists() and self.path.stat().st_size:
            hint = "continue it with --resume, or choose another file"
            raise UsageError(f"{path} has results already", hint=hint)
        self._file: IO[str] | None = None

    @property
    def _origin(self) -> Path:
        return self.path.with_name(f".{self.path.name}.input")

    def belongs_to(self, items: Items) -> None:
        """Remembers the input, or refuses another than before. One that has grown is the same."""
        if items.path == _STDIN:
            return
        if any(self.done) and self._origin.exists():
            before = json.loads(self._origin.read_text(encoding="utf-8"))
            whole, now = items.head(before["size"])
            if whole < before["size"] or now != before["sha256"]:
                hint = "resume with the same input, or choose another output"
                raise UsageError(f"{self.path} has results of another input than {items.path}", hint=hint)
        size, sha256 = items.head()
        self._origin.write_text(json.dumps({"size": size, "sha256": sha256}), encoding="utf-8")

    def __enter__(self) -> ResultFile:
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UgroError(f"{self.path} cannot be written: {(error.strerror or str(error)).lower()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, number: int, outcome: str | ItemFailed) -> None:
        assert self._file is not None, "opened by the with statement"
        try:
            self._file.write(_line(number, outcome))
        except OSError as error:
            what = f"{self.path} cannot be written: {(error.strerror or str(error)).lower()}"
            raise UgroError(what, hint="what is written is kept; continue with --resume") from error

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finish(self) -> None:
        """The map is complete: nothing is left to be resumed but failures."""
        self.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _keep_results(self) -> None:
        """What failed is tried again, so its lines go, and so does a line that was cut when its writer was killed."""
        kept = self.path.with_name(f".{self.path.name}.kept")
        is_same = True
        with self.path.open("rb") as old, kept.open("wb") as new:
            for line in old:
                number = _number_of(line)
                if number is None:
                    is_same = False
                    continue
                self._note(number)
                new.write(line)
            new.flush()
            os.fsync(new.fileno())
        if is_same:
            kept.unlink()
        else:
            kept.replace(self.path)

    def _note(self, number: int) -> None:
        if number >= len(self.done):
            self.done.extend(bytes(number + 1 - len(self.done) + len(self.done) // 4))
        self.done[number] = 1


def _opened(path: str) -> IO[str]:
    if path == _STDIN:
        return os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8", errors="surrogateescape")
    return open(path, encoding="utf-8", errors="surrogateescape")


def _number_of(line: bytes) -> int | None:
    """None: not a whole line with a result."""
    if not line.endswith(b"\n"):
        return None
    try:
        found: Any = json.loads(line)
    except ValueError:
        return None
    number = found.get("index") if isinstance(found, dict) and "result" in found else None
    return number if isinstance(number, int) and 0 <= number < 1 << 40 else None


def _line(number: int, outcome: str | ItemFailed) -> str:
    if not isinstance(outcome, ItemFailed):
        return f'{{"index": {number}, "result": {outcome}}}\n'
    error = {
        "kind": outcome.cause_kind,
        "message": outcome.reason,
        "traceback": outcome.traceback,
        "node": outcome.node,
        "input": outcome.item,
    }
    return json.dumps({"index": number, "error": error}) + "\n"
