"""The keys of a job file as options of ``ugro run`` and ``ugro launch``: their names, and their texts as values.

An option is named by its key, or as the schema says; ``script``, ``command`` and ``args`` are given without an option.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.kernel.config.kinds import BadValueError, Bool, Environment, ListOf, OrNull, flow, printable
from ugro.kernel.config.section import NO_OPTION, Key, KeyPath, Section, dotted, nearest
from ugro.kernel.jobs.config.kinds import GPUS, USE_A_FILE, FolderMap
from ugro.kernel.jobs.config.schema import JobSection
from ugro.kernel.jobs.model import JobSpec
from ugro.kernel.support.errors import ConfigError

POSITIONAL = ("script", "command", "args")
_MOST_NAMED = 1_000
_NAMED = {"env": "NAME=VALUE or NAME", "folder": "NAME=PATH"}


@dataclass(frozen=True, slots=True)
class Option:
    name: str  # with _ for -
    path: KeyPath
    key: Key

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def metavar(self) -> str:
        return self.key.kind.metavar

    @property
    def choices(self) -> tuple[str, ...]:
        """Words that a shell can complete."""
        return self.key.kind.choices

    @property
    def is_switch(self) -> bool:
        kind = self.key.kind
        return isinstance(kind.kind if isinstance(kind, OrNull) else kind, Bool)

    @property
    def may_repeat(self) -> bool:
        return isinstance(self.key.kind, ListOf | Environment | FolderMap)

    @property
    def help(self) -> str:
        """The first sentence of the key's meaning, and its default."""
        sentence = re.split(r"(?<=\.)\s", self.key.meaning, maxsplit=1)[0]
        first = re.sub(r"`([^`]*)`", lambda word: flag_of(word[1]) if word[1] in OPTIONS else word[1], sentence)
        if self.may_repeat:
            return f"{first} May be repeated."
        is_plain = self.key.default is None or self.is_switch
        return first if is_plain else f"{first} Default: {self.key.kind.described(self.key.default)}."


def flag_of(name: str) -> str:
    return name.upper() if name in POSITIONAL else f"--{printable(name).replace('_', '-')}"


def in_keys(text: str) -> str:
    """A text about options, with their keys instead."""
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda found: _key_of(found[1].replace("-", "_")) or found[0], text)


def _key_of(name: str) -> str | None:
    return dotted(OPTIONS[name].path) if name in OPTIONS else None


def _options(section: type[Section], base: KeyPath = ()) -> Iterator[Option]:
    for name, key in section.known_keys().items():
        if key.section is not None:
            yield from _options(key.section, (*base, name))
        elif key.option != NO_OPTION:
            yield Option(key.option or name, (*base, name), key)


OPTIONS = {option.name: option for option in _options(JobSection)}
_BY_PATH = {option.path: option for option in OPTIONS.values()}


@dataclass(slots=True)
class Given:
    """The values that options gave, by their place in the file, and the name of each for errors."""

    values: dict[KeyPath, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # by dotted key

    def add(self, path: KeyPath, value: object, name: str) -> None:
        self.values[path] = value
        self.names[dotted(path)] = name

    def over(self, tree: dict[str, object]) -> dict[str, object]:
        for path, value in self.values.items():
            _put(tree, [str(part) for part in path], value)
        return tree


def read_options(fields: Mapping[str, object], *, as_options: bool = True) -> Given:
    """``fields``: by the names of options, or by keys as a job file has them.

    None and a list without items count as not given, as for an option that was not used. ``as_options``: errors name
    options of a command, and else what was given.
    """
    given = Given()
    for name, value in fields.items():
        option, key = OPTIONS.get(name), JobSection.known_keys().get(name)
        section = key.section if key is not None and not (as_options and option is not None) else None
        if section is not None and isinstance(value, Mapping):
            _add_section(given, section, (name,), value)
        elif option is not None:
            _add(given, option, value, option.flag if as_options else name)
        elif key is not None:
            _add_key(given, (name,), value)
        else:
            raise _unknown(name, as_options=as_options)
    return given


def _unknown(name: str, *, as_options: bool) -> ConfigError:
    if as_options:
        near = nearest(name, OPTIONS)
        hint = f"did you mean {flag_of(near)}?" if near else f"the options are {', '.join(map(flag_of, OPTIONS))}"
        return ConfigError(f"{flag_of(name)}: unknown option", hint=hint)
    keys = JobSection.known_keys()
    near = "gpus_per_node" if name in GPUS else nearest(name, dict.fromkeys((*keys, *OPTIONS)))
    return ConfigError(
        f"{printable(name)}: unknown key", hint=f"did you mean {near}?" if near else f"the keys are {', '.join(keys)}"
    )


def _add_section(given: Given, section: type[Section], at: KeyPath, values: Mapping[object, object]) -> None:
    if len(values) > _MOST_NAMED:
        raise ConfigError(f"{dotted(at)}: expected at most {_MOST_NAMED} keys, got {len(values)}", hint=USE_A_FILE)
    for name, value in values.items():
        path = (*at, str(name))
        key = section.known_keys().get(str(name))
        if key is not None and key.section is not None and isinstance(value, Mapping):
            _add_section(given, key.section, path, value)
        else:
            _add_key(given, path, value)


def _add_key(given: Given, path: KeyPath, value: object) -> None:
    """One of a job file, perhaps unknown, which is found when the whole is read."""
    if (option := _BY_PATH.get(path)) is not None:
        _add(given, option, value, dotted(path))
    elif value is not None:
        given.add(path, value, dotted(path))


def _add(given: Given, option: Option, value: object, name: str) -> None:
    if value is None or (isinstance(value, list | tuple) and not value):
        return
    if isinstance(option.key.kind, Environment | FolderMap):
        _add_named(given, option, value, name)
    else:
        given.add(option.path, _checked(option, value, name), name)


def _put(place: dict[str, object], keys: list[str], value: object) -> None:
    """Where the file has something else than a map on the way, that stays, and is reported as the mistake."""
    key, *rest = keys
    if not rest:
        place[key] = value
        return
    if place.get(key) is None:
        place[key] = {}
    inner = place[key]
    if isinstance(inner, dict):
        _put(inner, rest, value)


def _checked(option: Option, value: object, named: str) -> object:
    """The value as the file would have given it."""
    kind = option.key.kind
    if isinstance(value, str) and option.name not in POSITIONAL:
        value = kind.from_text(value)
    elif isinstance(value, list | tuple) and isinstance(kind, ListOf):
        value = [kind.item.from_text(part) if isinstance(part, str) else part for part in value]
    try:
        kind.parse(value)
    except BadValueError as error:
        at = "".join(f"[{place!r}]" for place in error.at) if named != option.flag else ""
        raise ConfigError(f"{named}{at}: {error.message}", hint=error.hint or _example(option, named)) from error
    return value


def _add_named(given: Given, option: Option, value: object, named: str) -> None:
    """From a map, or from texts such as NAME=VALUE and NAME."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple):
        pairs = [text.partition("=") for text in texts if isinstance(text, str)]
        value = {name: text if equals else None for name, equals, text in pairs}
        if len(pairs) != len(texts):
            value = None
    [(first, sample)] = option.key.example.items()
    is_option = named == option.flag
    hint = f"for example: {named} {first}={sample}" if is_option else f"for example: {named}={{{first!r}: {sample!r}}}"
    if not isinstance(value, Mapping):
        expected = _NAMED[option.name] if is_option else option.key.kind.expected
        raise ConfigError(f"{named}: expected {expected}", hint=hint)
    if len(value) > _MOST_NAMED:
        raise ConfigError(f"{named}: expected at most {_MOST_NAMED}, got {len(value)}", hint=USE_A_FILE)
    for name, text in value.items():
        try:
            option.key.kind.parse({name: text})
        except BadValueError as error:
            at = "" if is_option else "".join(f"[{place!r}]" for place in error.at)
            raise ConfigError(f"{named}{at}: {error.message}", hint=hint) from error
        given.add((*option.path, name), text, f"{named} {name}" if is_option else f"{named}[{name!r}]")


def _example(option: Option, named: str) -> str:
    example = option.key.example
    if named != option.flag:
        first, *inner = named.split(".")
        return f"for example: {first}={_nested(inner, example)!r}"
    first = example[0] if isinstance(example, list | tuple) and example else example
    text = first if isinstance(first, str) else flow(first)
    return f"for example: {text}" if option.name in POSITIONAL else f"for example: {option.flag} {text}"


def _nested(keys: Sequence[str], value: object) -> object:
    return {keys[0]: _nested(keys[1:], value)} if keys else value


# --- keys as fields of a form -----------------------------------------------------------------------------------------
# The most used keys of a job as fields of a form: their values as text, and changed texts back to values.
#
# A changed field overrides the job file, as an option of ``ugro launch -f`` does. An emptied field means the default.


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
