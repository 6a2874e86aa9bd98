"""Splits a batch into parts: tensors, and tuples, lists, dicts and dataclasses of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, overload

from ugro.core.errors import UsageError

Range = tuple[int, int, int]  # begin, end, and the number of samples


def sizes(samples: int, count: int, *, exactly: bool = False) -> list[int]:
    """Ranges as equal as whole samples allow; with ``exactly`` so many, also if some are empty."""
    count = max(1, count if exactly else min(samples, count))
    return [samples // count + (number < samples % count) for number in range(count)]


@overload
def pieces(batch: Any, part: None) -> int: ...
@overload
def pieces(batch: Any, part: Range) -> Any: ...
def pieces(batch: Any, part: Range | None) -> Any:
    """Part of a batch; without a range, its number of samples."""
    if part is None:
        return _samples(batch)
    return batch if part[1] - part[0] == part[2] else _cut(batch, part)


def _samples(batch: Any) -> int:
    found = _lengths(batch)
    if not found:
        raise UsageError(
            f"a batch of type {type(batch).__name__} cannot be split",
            hint="collate into tensors, or tuples, lists, dicts or dataclasses of them",
        )
    return found[0]


def _lengths(batch: Any) -> list[int]:
    """The number of samples of the tensors in it."""
    if hasattr(batch, "shape"):
        return [int(batch.shape[0])] if len(batch.shape) else []
    return [length for child in _children(batch) for length in _lengths(child)]


def _children(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    if dataclasses.is_dataclass(batch):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return []


def _cut(batch: Any, part: Range) -> Any:
    begin, end, samples = part
    if hasattr(batch, "shape"):
        return batch[begin:end] if len(batch.shape) and batch.shape[0] == samples else batch
    if isinstance(batch, list | tuple) and len(batch) == samples and not _lengths(batch):
        return batch[begin:end]  # one text or similar per sample
    return _cut_children(batch, part)


def _cut_children(batch: Any, part: Range) -> Any:
    if isinstance(batch, Mapping):
        cut = {name: _cut(value, part) for name, value in batch.items()}
        return cut if type(batch) is dict else type(batch)(cut)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, part) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_cut(value, part) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: _cut(getattr(batch, field.name), part) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch
