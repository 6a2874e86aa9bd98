"""The keys of a job file as options of a command: their names, and their texts as values of the file.

A field is an option's name with ``_`` for ``-``; ``script``, ``command`` and ``args`` stand without an option.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from ugro.config.job.schema import JobSection
from ugro.config.kinds import BadValueError, Kind, ListOf
from ugro.config.problems import KeyPath, dotted, nearest
from ugro.config.validate import section_at
from ugro.config.yamltext import flow, printable
from ugro.core.errors import ConfigError

POSITIONAL = ("script", "command", "args")
FLAGS: dict[str, KeyPath] = {
    **{key: (key,) for key in POSITIONAL},
    "name": ("name",),
    "launcher": ("launcher",),
    "balance": ("balance",),
    "env": ("env",),
    "setup": ("setup",),
    "workdir": ("workdir",),
    "cwd": ("cwd",),
    "sync": ("sync",),
    "nodes": ("resources", "nodes"),
    "gpus_per_node": ("resources", "gpus_per_node"),
    "gpu_memory": ("resources", "gpu", "memory"),
    "gpu_model": ("resources", "gpu", "model"),
    "cpus": ("resources", "cpus"),
    "memory": ("resources", "memory"),
    "label": ("resources", "labels"),
    "priority": ("priority",),
    "preemptible": ("preemptible",),
    "time_limit": ("time_limit",),
    "after": ("after", "ok"),
    "after_any": ("after", "any"),
    "retries": ("retry", "max"),
    "retry_on": ("retry", "on"),
    "never_retry_on": ("retry", "never_on"),
    "checkpoint_dir": ("checkpoint", "dir"),
    "checkpoint_every": ("checkpoint", "every"),
    "lost_after": ("disconnect", "lost_after"),
    "on_lost": ("disconnect", "on_lost"),
    "stop_signal": ("stop", "signal"),
    "stop_grace": ("stop", "grace"),
    "output": ("outputs",),
    "result_checkpoints": ("results", "checkpoints"),
    "result_limit": ("results", "limit"),
    "job_seed": ("seed",),
    "cache": ("cache",),
    "cache_input": ("inputs",),
    "notify": ("notify",),
}


@dataclass(slots=True)
class Given:
    """The values that flags gave, by their place in the file, and what each is called when it is at fault."""

    values: dict[KeyPath, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # by dotted key

    def add(self, path: KeyPath, value: object, name: str) -> None:
        self.values[path] = value
        self.names[dotted(path)] = name


def read_flags(fields: Mapping[str, object]) -> Given:
    """None, and a list without items, count as not given: so does an option that nobody used."""
    given = Given()
    for name, value in fields.items():
        if name not in FLAGS:
            near = nearest(name, FLAGS)
            hint = f"did you mean {flag_of(near)}?" if near else f"there are {', '.join(map(flag_of, FLAGS))}"
            raise ConfigError(f"{flag_of(name)}: unknown option", hint=hint)
        if value is None or (isinstance(value, list | tuple) and not value):
            continue
        if name == "env":
            _add_variables(given, value)
        else:
            given.add(FLAGS[name], _checked(name, value), flag_of(name))
    return given


def flag_of(name: str) -> str:
    return name.upper() if name in POSITIONAL else f"--{printable(name).replace('_', '-')}"


@functools.cache
def kind_at(path: KeyPath) -> tuple[Kind, object]:
    """With an example of its values."""
    *parents, key = [str(part) for part in path]
    section = section_at(JobSection, parents)
    kind = section.kind_of(key)
    assert kind is not None, f"{key} has no kind"
    return kind, section.example_of(key)


def with_flags(tree: dict[str, object], given: Given) -> dict[str, object]:
    for path, value in given.values.items():
        _put(tree, [str(part) for part in path], value)
    return tree


def _put(place: dict[str, object], keys: list[str], value: object) -> None:
    """Where the file has something else than a map on the way, it stays: that is the mistake to tell."""
    key, *rest = keys
    if not rest:
        place[key] = value
        return
    if place.get(key) is None:
        place[key] = {}
    inner = place[key]
    if isinstance(inner, dict):
        _put(inner, rest, value)


def _checked(name: str, value: object) -> object:
    """The value as the file would have given it."""
    kind, example = kind_at(FLAGS[name])
    if isinstance(value, str) and name not in POSITIONAL:
        value = kind.from_text(value)
    elif isinstance(value, list | tuple) and isinstance(kind, ListOf):
        value = [kind.item.from_text(part) if isinstance(part, str) else part for part in value]
    try:
        kind.parse(value)
    except BadValueError as error:
        raise ConfigError(f"{flag_of(name)}: {error.message}", hint=error.hint or _example(name, example)) from error
    return value


def _add_variables(given: Given, value: object) -> None:
    """From a map, or from texts such as NAME=VALUE and NAME."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple):
        pairs = [text.partition("=") for text in texts if isinstance(text, str)]
        value = {name: text if equals else None for name, equals, text in pairs}
        if len(pairs) != len(texts):
            value = None
    if not isinstance(value, Mapping):
        raise ConfigError("--env: expected NAME=VALUE or NAME", hint="for example: --env HF_HOME=/data/hf")
    for name, text in value.items():
        try:
            kind_at(("env",))[0].parse({name: text})
        except BadValueError as error:
            raise ConfigError(f"--env: {error.message}", hint="for example: --env HF_HOME=/data/hf") from error
        given.add(("env", name), text, f"--env {name}")


def _example(name: str, example: object) -> str:
    first = example[0] if isinstance(example, list | tuple) and example else example
    text = first if isinstance(first, str) else flow(first)
    return f"for example: {text}" if name in POSITIONAL else f"for example: {flag_of(name)} {text}"
