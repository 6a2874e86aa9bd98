"""Tickets: what a run is, sealed by its agent and kept by the node, so that an older state can be caught up.

A ticket is the job at its start. Fields with their default values are left out: thousands of small jobs carry one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

from ugro.core.job import Job
from ugro.core.support.codec import DecodeError, decode, values_getter
from ugro.core.support.seal import sealed, unsealed

_PLAIN = frozenset({str, int, float, bool, type(None)})
_encode = json.JSONEncoder(separators=(",", ":")).encode


def ticket_of(key: bytes, agent: str, job: Job) -> str | None:
    """None without a key."""
    return sealed(key, _encode({"agent": agent, "job": _compact(job)})) if key else None


def read_ticket(key: bytes, agent: str, message: object) -> Job | None:
    """The job at its start; None for a ticket that is not proven to be ours."""
    text = unsealed(key, message)
    if text is None:
        return None
    with contextlib.suppress(ValueError, DecodeError, KeyError, TypeError):
        document = json.loads(text)
        return decode(Job, document["job"]) if document["agent"] == agent else None
    return None


def _compact(value: Any) -> Any:
    kind: type = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple):
        return [_compact(one) for one in value]
    if not dataclasses.is_dataclass(kind):
        return value
    names, defaults, values_of = _fields(kind)
    given = zip(names, values_of(value), defaults, strict=True)
    return {name: _compact(one) for name, one, default in given if one is not default and one != default}


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, ...], tuple[Any, ...], Callable[[Any], tuple[Any, ...]]]:
    """Their names and defaults, and what reads all of them at once."""
    fields = dataclasses.fields(kind)
    names = tuple(field.name for field in fields)
    return names, tuple(_default(field) for field in fields), values_getter(names)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
