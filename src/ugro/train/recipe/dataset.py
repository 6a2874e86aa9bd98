"""The rows to train and to evaluate on, from a hub dataset, or from files and folders of this machine."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ugro.kernel.support.errors import NotFound, UgroError, UsageError
from ugro.train.recipe.command_line import Named, say
from ugro.train.run import Run

# --- files ------------------------------------------------------------------------------------------------------------
# Rows of local files: text, CSV, JSON lines and Parquet. Every complaint names the file and the place in it.


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


# --- hub --------------------------------------------------------------------------------------------------------------
# Models and datasets by their hub ids: one process of each node downloads first, and a failure is one clear error.


T = TypeVar("T")

_ROUND_S = 5.0  # the longest that ranks wait for each other at once: a download may take longer than they would wait
_WAITS, _LOADS, _DONE, _FAILED = range(4)


def together(run: Run, load: Callable[[], T], what: str) -> T:
    """Loads on the first rank of every node, then on its other ranks, which find what was downloaded."""
    say(run, f"loading {what}")
    with contextlib.closing(ThreadPool(1)) as pool:
        return _loaded(run, pool, load, what)


def _loaded(run: Run, pool: ThreadPool, load: Callable[[], T], what: str) -> T:
    is_first = run.surroundings.local_rank == 0
    loading = pool.apply_async(load) if is_first else None
    rounds = 0
    while True:
        if loading is not None:
            loading.wait(_ROUND_S)
        states = run.gather(float(_state(loading)), float(is_first))
        if any(state == _FAILED for state, _ in states):
            _fail(run, loading)
        if loading is not None and all(state == _DONE for state, _ in states):
            return loading.get()
        if loading is None and all(state == _DONE for state, is_first_there in states if is_first_there):
            loading = pool.apply_async(load)
        rounds += 1
        if rounds % 6 == 0:
            say(run, f"still loading {what}")


def _state(loading: AsyncResult[T] | None) -> int:
    if loading is None:
        return _WAITS
    if not loading.ready():
        return _LOADS
    return _DONE if loading.successful() else _FAILED


def _fail(run: Run, loading: AsyncResult[T] | None) -> None:
    """Every rank says what went wrong on the first rank that failed; an unexpected error is raised as it is."""
    problem, hint = "", ""
    try:
        if loading is not None and loading.ready():
            loading.get()
    except UgroError as error:
        problem, hint = f"{run.surroundings.node}: {error}", error.hint or ""
    problems, hints = run.texts(problem), run.texts(hint)
    first = next((number for number, text in enumerate(problems) if text), None)
    if first is None:
        raise UgroError("another rank failed", hint="see its log")
    raise UgroError(problems[first], hint=hints[first] or None)


@contextlib.contextmanager
def explained(what: str, named: Named) -> Iterator[None]:
    """Turns what the libraries raise about a model or dataset into one error that says what to do."""
    from safetensors import SafetensorError

    http_error = import_module("huggingface_hub.errors").HTTPError  # of whichever library the hub's uses

    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, http_error) as error:
        raise _explanation(what, named, error) from error


def _explanation(what: str, named: Named, error: BaseException) -> UgroError:
    text = _first_line(error)
    words = " ".join(f"{type(one).__name__} {one}" for one in _chain(error)).lower()
    if named.is_local:
        return UgroError(f"{what} {named.name!r} cannot be read from {named.place}: {text}")
    if _has(words, "gatedrepo", "gated repo", "401 client", "403 client"):
        hint = f"accept its terms on huggingface.co/{named.place}, and give the job a token: HF_TOKEN"
        return UgroError(f"{what} {named.name!r} is gated or private", hint=hint)
    if _has(words, "connect", "couldn't reach", "offline", "localentrynotfound", "couldn't find cache", "timed out"):
        reason = f"{what} {named.name!r} is not in the cache here and cannot be downloaded: {text}"
        return UgroError(reason, hint=_how_to_get(what, named))
    if _has(words, "repositorynotfound", "404 client", "not a valid model identifier", "doesn't exist on the hub"):
        return NotFound(f"no {what} {named.name!r} on the hub: {text}", hint="check the name")
    return UgroError(f"{what} {named.name!r} cannot be loaded: {text}")


def _has(words: str, *signs: str) -> bool:
    return any(sign in words for sign in signs)


def _how_to_get(what: str, named: Named) -> str:
    kind = " --repo-type dataset" if what == "dataset" else ""
    return f"where there is a network: hf download {named.place}{kind} --local-dir FOLDER; then use --{what} FOLDER"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


# --- dataset ----------------------------------------------------------------------------------------------------------


_HELD_OUT = 0.05
_CHECKED_ROWS = 100  # to find the columns that have text


class Table(Protocol):
    """Rows that can be read several times."""

    @property
    def columns(self) -> list[str]: ...
    def __iter__(self) -> Iterator[Row]: ...
    def column(self, name: str) -> Iterable[Any]: ...
    def label_names(self, column: str) -> list[str] | None: ...


@dataclass(frozen=True, slots=True)
class LocalTable:
    paths: Sequence[Path]

    @property
    def columns(self) -> list[str]:
        """Of the first row: JSON rows may differ."""
        return [name for name in next(iter(self), {}) if name != STARTS]

    def __iter__(self) -> Iterator[Row]:
        return rows(self.paths)

    def column(self, name: str) -> Iterable[Any]:
        return (row.get(name) for row in self)

    def label_names(self, column: str) -> list[str] | None:
        return None


@dataclass(frozen=True, slots=True)
class HubTable:
    dataset: Any  # datasets.Dataset

    @property
    def columns(self) -> list[str]:
        return list(self.dataset.column_names)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.dataset)

    def column(self, name: str) -> Iterable[Any]:
        """Without reading the others, which may be images."""
        return list(self.dataset.select_columns([name])[name])

    def label_names(self, column: str) -> list[str] | None:
        return getattr(self.dataset.features.get(column), "names", None)


@dataclass(frozen=True, slots=True)
class Chosen:
    train: Table
    evaluation: Table | None
    held_out: float  # of the training rows, where there is no other split
    words: str


def tables(named: Named, suffixes: frozenset[str]) -> dict[str, Table]:
    """Every split that there is."""
    if named.is_local and not is_of_library(named.folder):
        return {name: LocalTable(paths) for name, paths in splits(named.folder, suffixes).items()}
    with explained("dataset", named):
        return {name: HubTable(one) for name, one in loaded(named).items()}


def loaded(named: Named) -> dict[str, Any]:
    import datasets

    if named.is_local and _is_saved(named.folder):
        found = datasets.load_from_disk(named.place)
    else:
        found = datasets.load_dataset(named.place, named.about_text("name"))
    return dict(found) if isinstance(found, dict) else {"train": found}


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def is_of_library(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote it, or it is a copy of a dataset of the hub."""
    if not folder.is_dir():
        return False
    card = folder / "README.md"
    return _is_saved(folder) or (card.is_file() and card.read_text("utf-8", "replace").startswith("---\n"))


def chosen(found: dict[str, Table], named: Named, wanted: str) -> Chosen:
    """``wanted`` is the flag --eval-split."""
    split = named.about_text("split") or "train"
    train = found.get(split) or _only(found)
    if train is None:
        raise UsageError(f"{named.name}: no split {split!r}", hint=f"it has: {', '.join(found)}")
    if wanted == "auto":
        candidates = (named.about_text("eval_split"), "validation", "test")
        wanted = next((one for one in candidates if one in found and found[one] is not train), str(_HELD_OUT))
    if wanted in found:
        return Chosen(train, found[wanted], 0.0, f"split {wanted}")
    held_out = fraction(wanted, named, found)
    return Chosen(train, None, held_out, f"{held_out:.3g} of the training data" if held_out else "nothing")


def _only(found: dict[str, Table]) -> Table | None:
    return next(iter(found.values())) if len(found) == 1 else None


def fraction(wanted: str, named: Named, found: Iterable[str]) -> float:
    try:
        value = 0.0 if wanted == "none" else float(wanted)
    except ValueError:
        hint = f"it has: {', '.join(found)}; or use a fraction such as 0.05, or none"
        raise UsageError(f"{named.name}: no split {wanted!r} to evaluate on", hint=hint) from None
    if not 0 <= value < 1:
        raise UsageError(f"--eval-split {wanted} is not a fraction between 0 and 1")
    return value


def text_column(table: Table, named: Named, wanted: str | None, label: str | None = None) -> str:
    columns = _some_columns(table, named)
    wanted = wanted or named.about_text("text")
    if wanted is not None:
        return _present(wanted, columns, named)
    if "text" in columns:
        return "text"
    head = [row for row, _ in zip(table, range(_CHECKED_ROWS), strict=False)]
    texts = [name for name in columns if name != label and all(isinstance(row.get(name), str) for row in head)]
    if len(texts) != 1:
        hint = f"name it: --text-column NAME; columns: {', '.join(columns)}"
        raise UsageError(f"{named.name}: no column 'text', and {len(texts) or 'no'} columns of texts", hint=hint)
    return texts[0]


def label_column(table: Table, named: Named, wanted: str | None) -> str:
    columns = _some_columns(table, named)
    wanted = wanted or named.about_text("label")
    if wanted is not None:
        return _present(wanted, columns, named)
    for usual in ("label", "labels", "class", "category", "target"):
        if usual in columns:
            return usual
    hint = f"name it: --label-column NAME; columns: {', '.join(columns)}"
    raise UsageError(f"{named.name}: no column 'label'", hint=hint)


def _some_columns(table: Table, named: Named) -> list[str]:
    if not (columns := table.columns):
        raise UsageError(f"{named.name}: no rows in it")
    return columns


def _present(wanted: str, columns: list[str], named: Named) -> str:
    if wanted not in columns:
        raise UsageError(f"{named.name}: no column {wanted!r}", hint=f"columns: {', '.join(columns)}")
    return wanted


def held_out(count: int, part: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train and to evaluate on: at least one for each, if there are two."""
    import random

    wanted = min(count - 1, max(1, round(count * part))) if part and count > 1 else 0
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return sorted(order[wanted:]), sorted(order[:wanted])
