"""The shapes in the API's description are those that the agent writes, and a check of an answer notices differences."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Any

import pytest
from typing_extensions import is_typeddict

from tests.rig.described import Description
from ugro.kernel.operations.answers import ANSWERS, JSON, LINES, AnswerSchemas, schemas_of
from ugro.kernel.support.codec import dumps

_DEEP = 12
_SIMPLE: dict[Any, Any] = {str: "x", int: 1, float: 0.5, bool: True}
EVENT = {"seq": 1, "at": "now", "kind": "queued", "text": "", "job": 1, "attempt": None, "node": None}


@cache
def schemas() -> AnswerSchemas:
    return schemas_of(ANSWERS.values())


def description() -> Description:
    return Description({"paths": {}, "components": {"schemas": schemas().components}})


def example(kind: Any, *, is_full: bool, depth: int = 0) -> Any:
    """A value of a type: with something in every field, or with nothing where that is allowed."""
    is_full = is_full and depth < _DEEP  # a class may have others of itself
    again = partial(example, is_full=is_full, depth=depth + 1)
    if (named := _named(kind)) is not None:
        made = {name: again(part) for name, part in named.items()}
        return kind(**made) if isinstance(kind, type) and is_dataclass(kind) else made
    parts, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return again(parts[0]) if is_full or type(None) not in parts else None
    if origin is tuple and parts[-1] is not Ellipsis:
        return [again(part) for part in parts]
    if origin in (tuple, list):
        return [again(parts[0])] if is_full else []
    return {} if origin is dict else _SIMPLE[kind] if kind in _SIMPLE else next(iter(kind))


def _named(kind: Any) -> Mapping[str, Any] | None:
    if isinstance(kind, Mapping):
        return kind
    return typing.get_type_hints(kind) if is_dataclass(kind) or is_typeddict(kind) else None


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("route", [route for route, answer in ANSWERS.items() if answer.media in (JSON, LINES)])
def test_a_document_that_the_agent_writes_has_the_described_shape(route: str, is_full: bool) -> None:
    answer = ANSWERS[route]
    for shape, schema in zip(answer.shapes, schemas().shapes.get(answer.name, ()), strict=True):
        written = json.loads(dumps(example(shape, is_full=is_full)))
        assert description().problems(schema, written) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, []),
        ({"seq": "1"}, ["$.seq: '1' is not of type 'integer'"]),
        ({"node": 7}, ["$.node: 7 is not valid under any of the given schemas"]),
        ({"more": 1}, ["$: Additional properties are not allowed ('more' was unexpected)"]),
    ],
)
def test_a_wrong_or_undescribed_field_is_noticed(change: dict[str, Any], problem: list[str]) -> None:
    assert description().problems({"$ref": "#/components/schemas/Event"}, {**EVENT, **change}) == problem


def test_a_missing_field_is_noticed_even_if_its_class_has_a_default() -> None:
    event = {name: value for name, value in EVENT.items() if name != "node"}
    [problem] = description().problems({"$ref": "#/components/schemas/Event"}, event)
    assert problem == "$: 'node' is a required property"
