"""Environment variables that override the cluster file: ``UGRO_<SECTION>_<KEY>`` for every key that is not a map."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ugro.config.kinds import BadValueError, Kind
from ugro.config.schema import Settings
from ugro.config.section import Key, Section
from ugro.config.yamltext import flow
from ugro.core.errors import ConfigError

S = TypeVar("S", bound=Section)

PREFIX = "UGRO_"


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    section: str | None  # None for a key of the top level
    key: str
    kind: Kind
    example: str


@functools.cache
def variables() -> Mapping[str, Variable]:
    found: list[Variable] = []
    for name, declared in Settings.known_keys().items():
        if declared.section is not None:
            found += [_variable(one, name) for one in declared.section.known_keys().values()]
        else:
            found.append(_variable(declared, None))
    return {variable.name: variable for variable in found}


def with_environment(settings: Settings, env: Mapping[str, str]) -> Settings:
    """An empty variable counts as not set; ``null`` clears a key that may be empty."""
    known = variables()
    _refuse_misspelt(env, known)
    for name, variable in known.items():
        if is_set(name, env):
            settings = _override(settings, variable, env[name].strip())
    return settings


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """The names of settings that two environments give different values."""
    return tuple(name for name in sorted(variables()) if _given(name, ours) != _given(name, theirs))


def is_set(name: str, env: Mapping[str, str]) -> bool:
    return _given(name, env) != ""


def _given(name: str, env: Mapping[str, str]) -> str:
    return env.get(name, "").strip()


def _variable(declared: Key, section: str | None) -> Variable:
    name = f"{PREFIX}{section}_{declared.name}" if section else f"{PREFIX}{declared.name}"
    return Variable(name.upper(), section, declared.name, declared.kind, _text(declared.example))


def _text(example: object) -> str:
    if isinstance(example, tuple | list):
        return ",".join(map(str, example))
    if isinstance(example, str):
        return example
    return json.dumps(example) if isinstance(example, dict) else flow(example)


def _override(settings: Settings, variable: Variable, text: str) -> Settings:
    try:
        value = variable.kind.parse(variable.kind.from_text(text))
    except BadValueError as error:
        hint = f"for example: {variable.name}={variable.example}"
        raise ConfigError(f"{variable.name}: {error.message}", hint=hint) from error
    if variable.section is None:
        return _with(settings, variable.key, value)
    return _with(settings, variable.section, _with(getattr(settings, variable.section), variable.key, value))


def _with(section: S, key: str, value: object) -> S:
    changes: dict[str, Any] = {key: value, "given_keys": section.given_keys | {key}}
    return replace(section, **changes)


def _refuse_misspelt(env: Mapping[str, str], known: Mapping[str, Variable]) -> None:
    """UGRO_SSH_TIMOUT must not be ignored silently. UGRO's other variables are not this close to any of these."""
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.93)
        if near:
            raise ConfigError(f"{name}: unknown variable", hint=f"did you mean {near[0]}?")
