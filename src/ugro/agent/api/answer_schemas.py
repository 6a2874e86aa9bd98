"""JSON schemas of what routes answer, made from the classes that the agent writes and the client reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ugro.agent.api.answers import Answer, Shape

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"
# What pydantic calls classes of the same name: by their modules, such as ugro__core__node__Role.
_QUALIFIED = re.compile(r"^\w+__(\w+?)__(\w+)$")


@dataclass(frozen=True, slots=True)
class AnswerSchemas:
    shapes: Mapping[str, tuple[Schema, ...]]  # by the names of operations
    components: Mapping[str, Schema]


class _AsWritten(GenerateJsonSchema):
    """As ``core/support/codec.py`` writes: every field of a dataclass is there, whether it has a default or not."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return bool(field.get("required", total)) if field["type"] == "typed-dict-field" else True

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would only repeat the field's name

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def schemas_of(answers: Iterable[Answer]) -> AnswerSchemas:
    kinds = [
        (f"{answer.name}_{number}", _kind(answer.name, shape))
        for answer in answers
        for number, shape in enumerate(answer.shapes)
    ]
    # In one: a class that many of them have is read once.
    all_kinds: TypeAdapter[Any] = TypeAdapter(make_dataclass("Answers", kinds))
    found = all_kinds.json_schema(mode="serialization", schema_generator=_AsWritten, ref_template=REFERENCE)
    names = short_names(found["$defs"])
    shapes: dict[str, tuple[Schema, ...]] = {}
    for key, schema in renamed(found["properties"], names).items():  # in order
        name = key.rpartition("_")[0]
        shapes[name] = (*shapes.get(name, ()), schema)
    return AnswerSchemas(shapes, {names[name]: renamed(one, names) for name, one in found["$defs"].items()})


def renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """With references to components by their new names."""
    if isinstance(schema, list):
        return [renamed(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: renamed(one, names) for key, one in schema.items()}
    if isinstance(reference := found.get("$ref"), str):
        prefix, _, name = reference.rpartition("/")
        found["$ref"] = f"{prefix}/{names.get(name, name)}"
    return found


def _kind(name: str, shape: Shape) -> Any:
    return make_dataclass(f"{camel(name)}Answer", list(shape.items())) if isinstance(shape, Mapping) else shape


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """``NodeRole`` for ``ugro__core__node__Role``."""
    found = {name: _QUALIFIED.sub(lambda match: f"{camel(match[1])}{match[2]}", name) for name in names}
    assert len(set(found.values())) == len(found), f"two classes would have one name: {sorted(found)}"
    return found
