"""A sweep's document as others see it: without the values of its user's variables, and without passwords. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ugro.core.support.secret import HIDDEN, without_passwords

_ENV = "env"


def without_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """The variables keep their names; of all other texts, only passwords in addresses are hidden."""
    found: dict[str, Any] = _without_passwords(dict(document))
    for job in _jobs(found.get("ugro")):
        if _ENV in job:
            job[_ENV] = _hidden(job[_ENV])
    return found


def _jobs(own: Any) -> Iterator[dict[str, Any]]:
    """Where a document has options of jobs: for all trials, and for single values of parameters."""
    if isinstance(own, dict):
        yield own
        for values in _maps(own.get("options")):
            yield from _maps(values)


def _maps(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield from (inner for inner in tree.values() if isinstance(inner, dict))


def _hidden(env: Any) -> Any:
    """A variable without a value is taken from the submitter's environment: there is nothing to hide."""
    if not isinstance(env, dict):
        return HIDDEN
    return {name: None if value is None else HIDDEN for name, value in env.items()}


def _without_passwords(value: Any) -> Any:
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, dict):
        return {key: _without_passwords(inner) for key, inner in value.items()}
    return [_without_passwords(inner) for inner in value] if isinstance(value, list) else value
