"""What each route is called in the API's description, and what it answers. Pure; read only when somebody asks for it.

The one table of it, with the same routes as ``access_rules``. A test holds real answers against the shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ugro.features.alerts.service import Watched
from ugro.features.services.model import ServiceReport
from ugro.features.sweeps.model import SweepPlan, SweepReport
from ugro.kernel.links.model import NodeReport
from ugro.kernel.operations.registry import requests
from ugro.kernel.operations.request import Needs, Raw, Request, operation_name

JSON = "application/json"
LINES = "application/x-ndjson"  # one JSON document per line
FRAMES = "application/vnd.ugro.frames"  # of ``node/wire.py``
TEXT = "text/plain"
Shape = Any  # a type; or names with types, for a document that has no class of its own


@dataclass(frozen=True, slots=True)
class Answer:
    """Without shapes: JSON that is not described, because only the commands of UGRO use it."""

    name: str  # of the operation; clients that are generated have it as a function
    shapes: tuple[Shape, ...] = ()  # the document is one of these; in a stream, each line is
    media: str = JSON


def _json(name: str, *shapes: Shape) -> Answer:
    return Answer(name, shapes)


def _lines(name: str, *shapes: Shape) -> Answer:
    return Answer(name, shapes, LINES)


_SERVICE = {"service": ServiceReport}
_SWEEP = {"sweep": SweepReport}

def _declared(kind: type[Request[Any]]) -> Answer:
    operation, name = kind.operation, operation_name(kind)
    if operation.line is not None:
        return Answer(name, (operation.line,), LINES)
    return Answer(name, () if operation.answer in (None, Raw) else (operation.answer,), operation.media)


ANSWERS: Mapping[str, Answer] = {
    **{kind.operation.route: _declared(kind) for kind in requests()},
    # Nodes.
    "GET /v1/nodes": _json("list_nodes", {"nodes": list[NodeReport], "watched": list[Watched]}),
    # Files of clients on other machines.
    "POST /v1/remote/items": _json("offer_files"),
    "POST /v1/remote/known": _json("find_known_tree"),
    "POST /v1/remote/missing": _json("find_missing_contents"),
    "POST /v1/remote/trees": _json("upload_contents"),
    # Jobs.
    "POST /v1/plans": _lines("plan_training"),
    "POST /v1/recipes/launch": _json("prepare_recipe"),
    "GET /metrics": Answer("get_prometheus_metrics", (str,), TEXT),
    # Sweeps.
    "POST /v1/sweeps": _json("create_sweep", _SWEEP, Needs),
    "POST /v1/sweeps/plan": _json("plan_sweep", {"plan": SweepPlan}, Needs),
    # Services.
    "POST /v1/services": _json("create_service", _SERVICE, Needs),
    "POST /v1/services/{name}/update": _json("update_service", _SERVICE, Needs),
    # Ray clusters.
    # Notifications.
}


# --- answer schemas ---------------------------------------------------------------------------------------------------
# JSON schemas of what routes answer, made from the classes that the agent writes and the client reads.


Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class AnswerSchemas:
    shapes: Mapping[str, tuple[Schema, ...]]  # by the names of operations
    components: Mapping[str, Schema]


class _AsWritten(GenerateJsonSchema):
    """As ``kernel/support/codec.py`` writes: every field of a dataclass is there, whether it has a default or not."""

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
    """Returns ``LinksRole`` for ``ugro__kernel__links__model__Role``: pydantic names classes of one name by modules."""
    found = {name: _short(name) for name in names}
    assert len(set(found.values())) == len(found), f"two classes would have one name: {sorted(found)}"
    return found


def _short(name: str) -> str:
    *places, last = name.split("__")
    where = [place for place in places if place not in ("model", "api")]
    return camel(where[-1]) + last if where else last
