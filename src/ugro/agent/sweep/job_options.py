"""Options of a job that the values of a sweep's parameters set. The schema of job files says which there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ugro.config.job.schema import JobSection
from ugro.config.kinds import BadValueError
from ugro.config.section import Key, made
from ugro.core.errors import ConfigError
from ugro.core.job import JobSpec, Launcher
from ugro.policy.sweep.options import ARGS, SCRIPT, Options

_ENV = "env"
# They name files or other jobs, which are read once for all trials, or they say where all trials run.
_OF_ALL = ("after", "command", "cwd", "environment", "folders", "inputs", "launcher", "name", "resources")
_COUNTED = ("priority", "time_limit", "stop")


def settable() -> dict[str, Key]:
    """The keys of a job file that may differ between trials."""
    known = {one.name for one in fields(JobSpec)}
    keys = JobSection.known_keys().items()
    own = {name: one for name, one in keys if (one.attribute or name) in known and name not in _OF_ALL}
    return {name: JobSection.known_keys()[name] for name in (SCRIPT, ARGS)} | own


def check_options(options: Options, base: JobSpec) -> None:
    """Raises ConfigError, which names the key."""
    keys = settable()
    for parameter, values in options.items():
        for value, given in values.items():
            for name, one in given.items():
                at = f"ugro.options.{parameter}.{value}.{name}"
                if name not in keys:
                    raise ConfigError(f"{at}: cannot differ between trials", hint=f"there is: {', '.join(keys)}")
                if name in (SCRIPT, ARGS) and base.launcher is Launcher.COMMAND:
                    raise ConfigError(f"{at}: the sweep runs a command", hint="program: train.py")
                _parsed(keys[name], one, at)


def as_counted(base: JobSpec, options: Options) -> list[JobSpec]:
    """The jobs of its trials, as far as quotas tell them apart."""
    found = [base]
    for values in options.values():
        given = [{name: one[name] for name in _COUNTED if name in one} for one in values.values()]
        made = [with_options(spec, one) for spec in found for one in given]
        found = list({(one.priority, one.time_limit_s, one.stop): one for one in made}.values()) or found
    return found


def with_options(spec: JobSpec, given: Mapping[str, Any]) -> JobSpec:
    """``given`` has been checked."""
    keys, changes = settable(), dict[str, Any]()
    script, *words = spec.argv
    changes["argv"] = (given.get(SCRIPT, script), *words, *given.get(ARGS, ()))
    for name, value in given.items():
        if name == _ENV:
            changes[_ENV] = tuple(sorted({**dict(spec.env), **value}.items()))
        elif name not in (SCRIPT, ARGS):
            changes[keys[name].attribute or name] = made(_parsed(keys[name], value, name))
    return replace(spec, **changes)


def _parsed(key: Key, value: Any, at: str) -> Any:
    try:
        if key.name == _ENV and isinstance(value, dict) and None in value.values():
            raise BadValueError("every variable needs a value here")
        return key.kind.parse(value)
    except BadValueError as error:
        raise ConfigError(f"{at}: {error.message}", hint=error.hint) from None
