"""The most used keys of a job as fields of a form: their values as text, and changed texts back to values.

A changed field overrides the job file, as an option of ``ugro launch -f`` does. An emptied field means the default.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ugro.config.job.options import OPTIONS, Given, read_options
from ugro.config.job.schema import JobSection
from ugro.config.yamltext import flow
from ugro.core.errors import ConfigError
from ugro.core.job import JobSpec

_LINES = ("env",)  # a variable on each line
_WORDS = ("args", "command")  # as a shell would split them
_ALWAYS = ("time_limit", "priority", "retries")
_ON_EACH_NODE = ("nodes", "gpus_per_node")
FIELDS = ("name", *_ALWAYS, *_ON_EACH_NODE, *_WORDS, *_LINES)


def form_values(spec: JobSpec) -> dict[str, str]:
    """The fields that such a job has. Values of variables that look secret are not among them."""
    section = JobSection.of_spec(spec)
    words = "command" if section.command is not None else "args"
    on_each_node = () if section.resources.any_of else _ON_EACH_NODE
    names = ("name", *on_each_node, *_ALWAYS)
    found = {name: _text(section, name) for name in names} | {words: shlex.join(getattr(section, words))}
    has_lines = any(value is not None and "\n" in value for value in section.env.values())
    return found if has_lines else {**found, "env": _variables(section.env)}


def read_form(texts: Mapping[str, str]) -> Given:
    """``texts``: the changed fields."""
    given = Given()
    for name, text in texts.items():
        if name not in FIELDS:
            raise ConfigError(f"{name}: not a field of this form")
        option = OPTIONS[name]
        if name in _LINES:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            variables = {path[1]: value for path, value in read_options({name: lines}).values.items()}
            given.add(option.path, variables, option.flag)  # all of them: one that is not there any more is removed
        elif not text.strip():
            given.add(option.path, option.key.kind.written(option.key.default), option.flag)
        else:
            value = _split(name, text) if name in _WORDS else text.strip()
            for path, found in read_options({name: value}).values.items():
                given.add(path, found, option.flag)
    return given


def _text(section: JobSection, name: str) -> str:
    option = OPTIONS[name]
    value: Any = section
    for part in option.path:
        value = getattr(value, str(part))
    if name == "time_limit" and value is not None:
        return _duration(value)
    written = option.key.kind.written(value)
    return "" if written is None else written if isinstance(written, str) else flow(written)


def _duration(length_s: float) -> str:
    """In the largest unit that says it exactly."""
    for unit, seconds in (("h", 3600), ("m", 60)):
        if length_s % seconds == 0:
            return f"{length_s / seconds:.0f}{unit}"
    return f"{flow(length_s)}s"


def _variables(env: Mapping[str, str | None]) -> str:
    return "\n".join(name if value is None else f"{name}={value}" for name, value in env.items())


def _split(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        message = f"{OPTIONS[name].flag}: {str(error).lower()}"
        raise ConfigError(message, hint="quote words with spaces as in a shell") from error
