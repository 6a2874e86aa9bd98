"""What the values of some parameters set: options of the job, instead of a flag of the script. Pure.

    ugro:
      options:
        mode:
          equal: {balance: off}
          measured: {balance: adaptive, args: [--epochs, 3]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ugro.core.errors import ConfigError
from ugro.core.sweep import Settings
from ugro.policy.sweep.space import Parameter

Options = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by parameter, by value: what a job file would say
SCRIPT, ARGS = "script", "args"
_EXAMPLE = "options: {mode: {equal: {balance: off}}}"


def read_options(tree: Any, parameters: Sequence[Parameter]) -> Options:
    """Raises ConfigError. Which options a job has is not known here."""
    known = {one.name: one for one in parameters}
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, values in _items("ugro.options", tree):
        at = f"ugro.options.{name}"
        if name not in known:
            raise ConfigError(f"{at}: there is no parameter of this name", hint=f"there is: {', '.join(known)}")
        found[name] = {value: dict(_items(f"{at}.{value}", given)) for value, given in _items(at, values)}
        wanted = list(_expected(known[name], found[name], at))
        if unused := [value for value in found[name] if value not in wanted]:
            raise ConfigError(f"{at}.{unused[0]}: no value of {name}", hint=f"there is: {', '.join(wanted)}")
    return found


def _expected(one: Parameter, given: Mapping[str, Any], at: str) -> Iterator[str]:
    """One by one: a range may have more values than fit into memory."""
    for word in map(_word, one.grid() or ()):
        if word not in given:
            raise ConfigError(f"{at}: nothing for the value {word!r:.60}", hint="every value needs an entry")
        yield word


def flags_of(options: Options, settings: Settings) -> Settings:
    """The parameters that are flags of the script."""
    return tuple(one for one in settings if one[0] not in options)


def options_of(options: Options, settings: Settings) -> dict[str, Any]:
    """What a trial's values set. Of the same option, the last parameter's counts; words of ``args`` add up."""
    found: dict[str, Any] = {}
    for name, text in settings:
        given = options.get(name, {}).get(_word(json.loads(text)), {})
        args = [*found.get(ARGS, ()), *given.get(ARGS, ())]
        found |= {**given, ARGS: args} if args else given
    return found


def scripts_of(options: Options) -> list[str]:
    """The scripts that some trial runs instead of the sweep's own."""
    found = [given[SCRIPT] for values in options.values() for given in values.values() if SCRIPT in given]
    return list(dict.fromkeys(found))


def _items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key}: expected a map of keys to values, got {value!r:.60}", hint=_EXAMPLE)
    return ((_word(name), inner) for name, inner in value.items())


def _word(value: Any) -> str:
    """As keys of a map are written: a number and its text are the same."""
    return value if isinstance(value, str) else json.dumps(value)
