"""Converts frozen dataclasses to JSON and back, strictly: a missing field or a wrong type is an error.

Used at the edges (a node's answer, an API reply). Converters are built once per class, because a health check of a
hundred nodes passes through here twice.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

Converter = Callable[[Any], Any]
T = TypeVar("T")

_LARGEST = 1 << 64


class DecodeError(ValueError):
    """The JSON does not match the type; the message names the field."""


def dumps(value: Any) -> str:
    """The JSON text of a dataclass, or of dicts and lists that contain some."""
    return _encoder.encode(value)


def dumps_shown(value: Any, shown: Callable[[Any], Any]) -> str:
    """The same, with ``shown`` of each dataclass in its place."""
    encoder = json.JSONEncoder(default=lambda one: _shallow(shown(one)), separators=(",", ":"))
    return encoder.encode(value)


def _shallow(value: Any) -> Any:
    cls: type = type(value)
    names, values_of = _fields(cls)
    return dict(zip(names, values_of(value), strict=True))


# Created once: json.dumps with non-default settings creates a new one on every call.
_encoder = json.JSONEncoder(default=_shallow, separators=(",", ":"))


def decode(cls: type[T], value: Any) -> T:
    hint: Any = cls
    result: T = _converter(hint)(value)
    return result


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Their names, and what reads all of them at once."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} has no JSON form")
    names = tuple(field.name for field in dataclasses.fields(cls))
    return names, values_getter(names)


def values_getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads these attributes; much faster than one by one."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


@functools.cache
def _converter(hint: Any) -> Converter:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional(hint)
    if origin is tuple:
        return _sequence(hint)
    if dataclasses.is_dataclass(hint):
        return _record(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    if hint is float:
        return _exact(float, int)
    return _exact(dict if origin is dict else hint)  # anybody who uses a dict looks at what is in it


def _exact(*wanted: type) -> Converter:
    def convert(value: Any) -> Any:
        # In Python, bool is a subclass of int.
        if type(value) not in wanted:
            raise DecodeError(f"expected {wanted[0].__name__}, got {value!r:.60}")
        # A float, or a line of a table, has no room for any number of digits.
        if type(value) is int and not -_LARGEST <= value < _LARGEST:
            raise DecodeError(f"{value!r:.30}… is too large")
        return value

    return convert


def _optional(hint: Any) -> Converter:
    inner = [part for part in typing.get_args(hint) if part is not types.NoneType]
    if len(inner) == len(typing.get_args(hint)) and all(map(dataclasses.is_dataclass, inner)):
        return _one_of(inner)
    if len(inner) != 1:
        raise TypeError(f"only optional values are decoded, and one of several dataclasses, not {hint}")
    converter = _converter(inner[0])
    return lambda value: None if value is None else converter(value)


def _one_of(kinds: Sequence[Any]) -> Converter:
    """Decodes the first class whose fields the document has, all of them."""

    def convert(value: Any) -> Any:
        for kind in kinds if isinstance(value, dict) else ():
            if value.keys() >= set(_fields(kind)[0]):
                return _converter(kind)(value)
        raise DecodeError(f"expected {' or '.join(kind.__name__ for kind in kinds)}, got {value!r:.60}")

    return convert


def _sequence(hint: Any) -> Converter:
    parts = typing.get_args(hint)
    if len(parts) == 2 and parts[1] is Ellipsis:
        item = _converter(parts[0])
        return lambda value: tuple([item(entry) for entry in _list(value)])
    items = [_converter(part) for part in parts]

    def convert(value: Any) -> Any:
        if len(_list(value)) != len(items):
            raise DecodeError(f"expected {len(items)} values, got {value!r:.60}")
        return tuple(item(entry) for item, entry in zip(items, value, strict=True))

    return convert


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DecodeError(f"expected a list, got {value!r:.60}")
    return value


def _record(cls: Any) -> Converter:
    @functools.cache
    def fields() -> list[tuple[str, Converter]]:
        # Resolved with the first value, because a class may refer to itself.
        hints = typing.get_type_hints(cls)
        return [(name, _converter(hints[name])) for name in _fields(cls)[0]]

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            raise DecodeError(f"expected {cls.__name__}, got {value!r:.60}")
        arguments = {}
        name = ""
        try:
            for name, converter in fields():
                if name in value:
                    arguments[name] = converter(value[name])
            return cls(**arguments)
        except (ValueError, TypeError) as error:
            raise DecodeError(f"{cls.__name__}.{name}: {error}") from None

    return convert
