"""The command of a trial: W&B's macros, flags, and the variables that every trial has. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ugro.core.errors import ConfigError
from ugro.core.sweep import Settings

ARGS = ("${args}", "${args_no_boolean_flags}", "${args_no_hyphens}", "${args_json}")
_PLAIN = ("${env}", "${interpreter}", "${program}")
_VARIABLE = re.compile(r"\$\{envvar:([A-Za-z_][A-Za-z0-9_]*)\}")
_MACRO = re.compile(r"\$\{[^{}]*\}")
_ODD = re.compile(r"[^A-Za-z0-9]+")
ALL = "UGRO_PARAMS"  # all of them, as JSON; nested as in the file


def check_command(words: Any) -> tuple[str, ...]:
    """A command's words; raises ConfigError for a macro that is not known."""
    if words is None:
        return ()
    if isinstance(words, str):
        words = [words]
    if not isinstance(words, list) or not words or not all(isinstance(one, str | int | float) for one in words):
        hint = "command: ['${interpreter}', '${program}', '${args}']"
        raise ConfigError("command: expected a list of words", hint=hint)
    for macro in (macro for word in words for macro in _MACRO.findall(str(word))):
        if macro not in (*ARGS, *_PLAIN) and not _VARIABLE.fullmatch(macro):
            known = ", ".join((*_PLAIN, *ARGS, "${envvar:NAME}"))
            raise ConfigError(f"command: {macro} is not supported here", hint=f"there is: {known}")
    return tuple(str(word) for word in words)


def template(command: Sequence[str], program: str | None) -> tuple[bool, list[str]]:
    """Whether UGRO launches the program as a script, and the words: after the script, or of the whole command.

    ``${args}`` and its relatives stay: each trial has its own.
    """
    words = [word for word in command if word != "${env}"] or ["${interpreter}", "${program}", "${args}"]
    if program is None and "${program}" in words:
        raise ConfigError("program: missing", hint="program: train.py, or name the script: ugro sweep train.py -f FILE")
    if words[:2] == ["${interpreter}", "${program}"]:
        return True, words[2:]
    known = {"${interpreter}": "python3", "${program}": program or ""}
    return False, [known.get(word, word) for word in words]


def wanted_variables(words: Sequence[str]) -> tuple[str, ...]:
    """Variables of the user that the command names."""
    return tuple(dict.fromkeys(name for word in words for name in _VARIABLE.findall(word)))


def with_variables(words: Sequence[str], known: Mapping[str, str]) -> list[str]:
    def value(found: re.Match[str]) -> str:
        if found[1] not in known:
            raise ConfigError(f"command: the variable {found[1]} is not set here", hint=f"export {found[1]}=…")
        return known[found[1]]

    return [_VARIABLE.sub(value, word) for word in words]


def expanded(words: Sequence[str], settings: Settings) -> list[str]:
    """With the flags of a trial."""
    return [part for word in words for part in (_flags(word, settings) if word in ARGS else [word])]


def variables(settings: Settings) -> dict[str, str]:
    """What a trial finds in its environment."""
    named = {f"UGRO_PARAM_{_ODD.sub('_', name).strip('_').upper()}": _word(text) for name, text in settings}
    return {**named, ALL: json.dumps(nested(settings))}


def nested(settings: Settings) -> dict[str, Any]:
    """``optimizer.lr`` is lr of optimizer."""
    found: dict[str, Any] = {}
    for name, text in settings:
        inner = found
        *outer, last = name.split(".")
        for part in outer:
            step = inner.setdefault(part, {})
            inner = step if isinstance(step, dict) else inner
        inner[last] = json.loads(text)
    return found


def _flags(macro: str, settings: Settings) -> list[str]:
    if macro == "${args_json}":
        return [json.dumps(nested(settings))]
    hyphens = "" if macro == "${args_no_hyphens}" else "--"
    found = []
    for name, text in settings:
        if macro == "${args_no_boolean_flags}" and text in ("true", "false"):
            found += [f"--{name}"] if text == "true" else []
        else:
            found.append(f"{hyphens}{name}={_word(text)}")
    return found


def _word(text: str) -> str:
    """As W&B writes it: Python's own words for true, false and nothing; a text without quotes."""
    return str(json.loads(text))
