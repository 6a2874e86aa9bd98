"""Environment variables over the file: ``UGRO_<SECTION>_<KEY>`` for every key that is no map."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ugro.config.kinds import BadValueError, Kind
from ugro.config.schema import Section, Settings
from ugro.config.yamltext import flow
from ugro.core.errors import ConfigError

PREFIX = "UGRO_"


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    section: str | None  # None: a key of the file's top level
    key: str
    kind: Kind
    example: str


def variables() -> dict[str, Variable]:
    found: list[Variable] = []
    for key, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            found += [_variable(section, name, key) for name in section.model_fields]
        else:
            found.append(_variable(Settings, key, None))
    return {variable.name: variable for variable in found}


def with_environment(settings: Settings, env: Mapping[str, str]) -> Settings:
    """An empty variable counts as not set; ``null`` clears a key that may be empty."""
    known = variables()
    _refuse_misspelt(env, known)
    for name, variable in known.items():
        if is_set(name, env):
            settings = _override(settings, variable, env[name].strip())
    return settings


def is_set(name: str, env: Mapping[str, str]) -> bool:
    return env.get(name, "").strip() != ""


def _variable(section: type[Section], key: str, section_name: str | None) -> Variable:
    name = f"{PREFIX}{section_name}_{key}" if section_name else f"{PREFIX}{key}"
    kind = section.kind_of(key)
    assert kind is not None, f"{section.__name__}.{key} has no kind"
    example = section.example_of(key)
    text = ",".join(map(str, example)) if isinstance(example, tuple) else flow(example)
    return Variable(name.upper(), section_name, key, kind, text)


def _override(settings: Settings, variable: Variable, text: str) -> Settings:
    try:
        value = variable.kind.parse(variable.kind.from_text(text))
    except BadValueError as error:
        hint = f"for example: {variable.name}={variable.example}"
        raise ConfigError(f"{variable.name}: {error.message}", hint=hint) from error
    if variable.section is None:
        return settings.model_copy(update={variable.key: value})
    section: Section = getattr(settings, variable.section)
    return settings.model_copy(update={variable.section: section.model_copy(update={variable.key: value})})


def _refuse_misspelt(env: Mapping[str, str], known: Mapping[str, Variable]) -> None:
    """UGRO_SSH_TIMOUT would be ignored in silence. UGRO's other variables are not as near to any of these."""
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.93)
        if near:
            raise ConfigError(f"{name}: unknown variable", hint=f"did you mean {near[0]}?")
