"""Values against a section of the schema; what is wrong is said in our words, with a line and a hint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ugro.config.document import Document
from ugro.config.kinds import BadValueError
from ugro.config.problems import KeyPath, Problem, nearest
from ugro.config.schema import NodeEntry, Section, Settings
from ugro.config.yamltext import flow

S = TypeVar("S", bound=Section)


def validated(model: type[S], tree: object, base: KeyPath, document: Document, problems: list[Problem]) -> S | None:
    """None when something was wrong, which is then in ``problems``."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(model, found, base, document) for found in error.errors(include_url=False)]
        return None


def _problem(model: type[Section], found: ErrorDetails, base: KeyPath, document: Document) -> Problem:
    place = found["loc"]
    keys = [part for part in place if isinstance(part, str)]
    section = section_at(model, keys[:-1])
    error = found.get("ctx", {}).get("error")
    if isinstance(error, BadValueError):
        hint = error.hint or _example(section, keys, base)
        return document.problem((*base, *place, *error.at), error.message, hint)
    return document.problem((*base, *place), "unknown key", _known_keys(section, str(place[-1])))


def section_at(model: type[Section], keys: Sequence[str]) -> type[Section]:
    for key in keys:
        inner = model.model_fields[key].annotation
        if get_origin(inner) is tuple:  # a list of sections
            inner = get_args(inner)[0]
        assert isinstance(inner, type), f"{key} is a section"
        assert issubclass(inner, Section), f"{key} is a section"
        model = inner
    return model


def _example(section: type[Section], keys: Sequence[str], base: KeyPath) -> str:
    if keys:
        return f"for example: {keys[-1]}: {flow(section.example_of(keys[-1]))}"
    return f"for example: {base[-1]}: {flow({key: section.example_of(key) for key in ('ip', 'user')})}"


def _known_keys(section: type[Section], key: str) -> str:
    known = [*(["nodes"] if section is Settings else []), *section.model_fields]
    near = nearest(key, known)
    if near:
        return f"did you mean {near}?"
    return f"the keys of {'a node' if section is NodeEntry else 'this map'} are {', '.join(known)}"
