"""The rows to train and to evaluate on, from a hub dataset, or from files and folders of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ugro.core.errors import UsageError
from ugro.train.recipe import files
from ugro.train.recipe.files import Row
from ugro.train.recipe.hub import explained
from ugro.train.recipe.table import Named

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
        return [name for name in next(iter(self), {}) if name != files.STARTS]

    def __iter__(self) -> Iterator[Row]:
        return files.rows(self.paths)

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
        return {name: LocalTable(paths) for name, paths in files.splits(named.folder, suffixes).items()}
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
