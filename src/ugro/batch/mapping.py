"""``ugro map``: a function of a script over a file of items, with the results on disk. Can be continued."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ugro.batch.errors import ItemFailed, PoolBroken
from ugro.batch.jsonl import Counted, Items, ResultFile
from ugro.batch.pool import Pool
from ugro.batch.run import Progress
from ugro.batch.script import ScriptFunction
from ugro.core.errors import Interrupted, NotFound, UsageError

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
