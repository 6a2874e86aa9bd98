"""``ugro map``: a function of a script over a file of items, with the results on disk. Can be continued."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ugro.features.batches.model import ItemFailed, PoolBroken
from ugro.features.batches.pool import Pool
from ugro.features.batches.run import Progress
from ugro.features.batches.worker import ScriptFunction
from ugro.kernel.support.errors import Interrupted, NotFound, UgroError, UsageError

# --- jsonl ------------------------------------------------------------------------------------------------------------
# Items from a file of JSON lines, and results into one: each line with the number of its item, so that a map that was
# interrupted can go on. A line is one item; lines without anything are none.


_READ = 1 << 20
_STDIN = "-"
_BEGINNING = b'{"index": '


class Items:
    """The lines of a file, without those that are done; remembers which number each had."""

    def __init__(self, path: str) -> None:
        self.path, self._done = path, bytearray()
        self._numbers: dict[int, int] = {}  # of items under way: by their place in the map
        if path != _STDIN and not Path(path).is_file():
            raise NotFound(f"there is no file {path}", hint="check its name, and the folder that you are in")

    @property
    def is_stream(self) -> bool:
        return self.path == _STDIN

    def skip(self, done: bytearray) -> None:
        """``done``: a byte for each item, 1 if it is not to be given."""
        self._done = done

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

    def hashes(self, size: int | None) -> tuple[int, str, str | None]:
        """The size and the hash of the file, and the hash that it had when it had that size; None: it is shorter."""
        whole, length, part = hashlib.sha256(), 0, hashlib.sha256().hexdigest() if size == 0 else None
        with open(self.path, "rb") as file:
            while piece := file.read(min(_READ, size - length) if size is not None and length < size else _READ):
                whole.update(piece)
                length += len(piece)
                if length == size:
                    part = whole.hexdigest()
        return length, whole.hexdigest(), part


class Counted:
    """An input that says its length."""

    def __init__(self, items: Items, left: int) -> None:
        self._items, self._left = items, left

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return self._left


class ResultFile:
    """Lines such as ``{"index": 3, "result": …}`` or ``{"index": 4, "error": {…}}``. One map writes it at a time."""

    def __init__(self, path: str, *, resumes: bool) -> None:
        self.path = Path(path)
        self.done = bytearray()  # a byte for each item: 1 if it has a result
        self.written = 0  # results by this map
        if not self.path.parent.is_dir():
            raise NotFound(f"there is no folder {self.path.parent}")
        try:
            self._file = _locked(self.path)
            with contextlib.ExitStack() as unless_begun:
                unless_begun.callback(lambda: self._file.close())
                self._begin(resumes=resumes)
                unless_begun.pop_all()
        except OSError as error:
            raise self._unwritable(error) from error

    def _begin(self, *, resumes: bool) -> None:
        if self.path.stat().st_size and not resumes:
            hint = "continue it with --resume, or choose another file"
            raise UsageError(f"{self.path} has results already", hint=hint)
        if resumes and self.path.is_file():
            self._keep_results()

    @property
    def _origin(self) -> Path:
        return self.path.with_name(f".{self.path.name}.input")

    def belongs_to(self, items: Items, function: str, source: str) -> bool:
        """Remembers what the results are of, or refuses another input or function than before.

        An input that has grown is the same. A script that was changed may be the one that was mended: returns whether
        there are results of another version of it.
        """
        before = _read_origin(self._origin) if any(self.done) else {}
        script = hashlib.sha256(source.encode()).hexdigest()
        origin: dict[str, Any] = {"function": function, "script": script}
        if before.get("function", function) != function:
            hint = "resume with the same function, or choose another output"
            raise UsageError(f"{self.path} has results of the function {before['function']}", hint=hint)
        if not items.is_stream:
            size, whole, part = items.hashes(before.get("size"))
            if part != before.get("sha256"):
                hint = "resume with the same input, or choose another output"
                raise UsageError(f"{self.path} has results of another input than {items.path}", hint=hint)
            origin |= {"size": size, "sha256": whole}
        try:
            _write_origin(self._origin, origin)
        except OSError as error:
            raise self._unwritable(error) from error
        return bool(before.get("script", script) != script)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            if kind is None:  # else that is what the user is told
                raise self._unwritable(error) from error

    def add(self, number: int, outcome: str | ItemFailed) -> None:
        try:
            self._file.write(_line(number, outcome))
        except OSError as error:
            raise self._unwritable(error) from error
        self.written += not isinstance(outcome, ItemFailed)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def finish(self) -> None:
        """The map is complete: nothing is left to be resumed but failures."""
        self.flush()
        if self.path.is_file():
            os.fsync(self._file.fileno())

    def _unwritable(self, error: OSError) -> UgroError:
        what = f"{self.path} cannot be written: {(error.strerror or str(error)).lower()}"
        return UgroError(what, hint="what is written is kept; continue with --resume" if self.written else None)

    def _keep_results(self) -> None:
        """What failed is tried again, so its lines go, and so does a line that was cut when its writer was killed."""
        kept = self.path.with_name(f".{self.path.name}.kept")
        try:
            with self.path.open("rb") as old, kept.open("wb") as new:
                is_same = True
                for place, line in enumerate(old, start=1):
                    is_same = self._is_kept(line, place, new) and is_same
                new.flush()
                os.fsync(new.fileno())
            if not is_same:
                mended = _locked(kept)
                kept.replace(self.path)
                self._file.close()
                self._file = mended
        finally:
            kept.unlink(missing_ok=True)

    def _is_kept(self, line: bytes, place: int, new: IO[bytes]) -> bool:
        number = _number_of(line)
        if number is None and not _is_ours(line):
            hint = "choose another output; nothing was changed"
            raise UsageError(f"line {place} of {self.path} is not a result of ugro map", hint=hint)
        if number is None or (number < len(self.done) and self.done[number]):
            return False
        if number >= len(self.done):
            self.done.extend(bytes(number + 1 - len(self.done) + len(self.done) // 4))
        self.done[number] = 1
        new.write(line)
        return True


def _locked(path: Path) -> IO[str]:
    """Opened for appending; nobody else has it as long as it is open."""
    while True:
        file = path.open("a", encoding="utf-8")
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # such as /dev/null
                return file
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError as error:
            file.close()
            hint = "wait until it has ended, or choose another output"
            raise UsageError(f"another map is writing {path}", hint=hint) from error
        file.close()  # somebody has replaced it meanwhile


def _read_origin(path: Path) -> dict[str, Any]:
    """Empty if it is not there, or was cut when its writer was killed."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_origin(path: Path, content: dict[str, Any]) -> None:
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


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


def _is_ours(line: bytes) -> bool:
    """A failure, or a line that was cut: by the end of its writer, or by that of the machine, which leaves zeros."""
    text = line.strip(b"\0\r\n ")
    is_cut = (b"\0" in line or not line.endswith(b"\n")) and _BEGINNING.startswith(text)
    return not text or is_cut or text.replace(b" ", b"").startswith(_BEGINNING.replace(b" ", b""))


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


# --- mapping ----------------------------------------------------------------------------------------------------------


_SHOW_S = 0.2  # between two looks at the progress; results are written out as often


@dataclass(frozen=True, slots=True)
class MapWish:
    target: str  # script.py:function
    input: str
    output: str
    resumes: bool = False
    is_ordered: bool = True
    retries: int = 1
    timeout_s: float | None = None
    shared: Mapping[str, str] = field(default_factory=dict)  # names and files


@dataclass(frozen=True, slots=True)
class MapReport:
    output: str
    items: int  # that were run now
    failed: int
    resumed: int  # that had results before
    seconds: float
    nodes: Mapping[str, int]
    first_failure: str | None = None
    is_script_changed: bool = False  # the results before are of another version of it

    @property
    def items_per_s(self) -> float:
        return self.items / self.seconds if self.seconds > 0 else 0.0


def run_map(wish: MapWish, open_pool: Callable[[], Pool], on_progress: Callable[[Progress], None]) -> MapReport:
    function, shared, items = script_function(wish.target), shared_files(wish.shared), Items(wish.input)
    _expect_another_file(wish)
    with ResultFile(wish.output, resumes=wish.resumes) as results:
        items.skip(results.done)
        is_changed = results.belongs_to(items, function.name, function.source)
        total, before = items.count(), sum(results.done)
        source: Any = items if total is None else Counted(items, max(0, total - before))
        with open_pool() as pool:
            begin = pool.map if wish.is_ordered else pool.imap_unordered
            options = {"shared": shared, "retries": wish.retries, "timeout_s": wish.timeout_s, "errors": "return"}
            found = begin(function, source, **options)
            first = _written(found, items, results, on_progress)
            results.finish()
    end = found.progress
    return MapReport(wish.output, end.done, end.failed, before, end.elapsed_s, end.nodes, first, is_changed)


def _written(found: Any, items: Items, results: ResultFile, on_progress: Callable[[Progress], None]) -> str | None:
    """The first failure, in words. However it ends, the results until then are in the file."""
    try:
        return _write(found, items, results, on_progress)
    except KeyboardInterrupt:
        results.flush()
        hint = "continue with the same command and --resume"
        done = sum(results.done) + results.written
        raise Interrupted(f"interrupted; {done:,} results are in {results.path}", hint=hint) from None
    except PoolBroken as error:
        results.flush()
        hint = "when that is mended, continue with the same command and --resume"
        raise PoolBroken(f"{error.message}; the results until then are in {results.path}", hint=hint) from error


def _write(found: Any, items: Items, results: ResultFile, on_progress: Callable[[Progress], None]) -> str | None:
    first, shown = None, time.monotonic()
    for place, outcome in found.with_indices(on_wait=results.flush):
        number = items.number(place)
        results.add(number, outcome)
        if first is None and isinstance(outcome, ItemFailed):
            first = f"item {number}: {outcome.message}"
        if (now := time.monotonic()) - shown > _SHOW_S:
            results.flush()
            on_progress(found.progress)
            shown = now
    return first


def _expect_another_file(wish: MapWish) -> None:
    """With --resume, what is not a result would be taken out of it."""
    if os.path.exists(wish.input) and os.path.exists(wish.output) and os.path.samefile(wish.input, wish.output):
        raise UsageError(f"{wish.output} is both the input and the output", hint="choose another output")


def script_function(target: str) -> ScriptFunction:
    path, _, name = target.rpartition(":")
    if not path or not name.isidentifier():
        raise UsageError(f"{target!r} names no function", hint="name it like this: script.py:function")
    try:
        source = Path(path).read_text(encoding="utf-8")
        compile(source, path, "exec")
    except OSError as error:
        raise _unreadable(path, error) from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not a Python script: {error}") from error
    return ScriptFunction(str(Path(path).absolute()), source, name)


def _unreadable(path: str, error: OSError) -> NotFound:
    why = (error.strerror or str(error)).lower()
    return NotFound(f"{path} cannot be read: {why}", hint="check its name, and the folder that you are in")


def shared_files(files: Mapping[str, str]) -> dict[str, Any]:
    """A ``.json`` file as its value, any other as bytes."""
    import json

    found: dict[str, Any] = {}
    for name, path in files.items():
        try:
            content = Path(path).read_bytes()
            found[name] = json.loads(content) if path.endswith(".json") else content
        except OSError as error:
            raise _unreadable(path, error) from error
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
    return found
