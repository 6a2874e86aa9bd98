"""The operations that there are: the request classes in ``operations.py`` of each room and feature."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from ugro.kernel.operations.request import Request

_PARENTS = ("ugro.kernel", "ugro.features")


@cache
def requests() -> tuple[type[Request[Any]], ...]:
    """Returns every request class. Raises if two have the same route or name."""
    found: dict[str, type[Request[Any]]] = {}
    for name in _modules():
        for one in vars(import_module(name)).values():
            if isinstance(one, type) and issubclass(one, Request) and one is not Request and one.__module__ == name:
                for key in (one.operation.route, one.__name__):
                    if found.setdefault(key, one) is not one:
                        raise TypeError(f"{key} is declared twice: {found[key].__module__} and {name}")
    return tuple(dict.fromkeys(found.values()))


def request_for(method: str, path: str) -> type[Request[Any]] | None:
    """Returns the request that a method and an address mean."""
    own = (kind for kind in requests() if kind.operation.method == method)
    return next((kind for kind in own if kind.operation.values_in(path) is not None), None)


def _modules() -> Iterator[str]:
    for parent in _PARENTS:
        for room in iter_modules(import_module(parent).__path__, f"{parent}."):
            if room.ispkg and find_spec(f"{room.name}.operations") is not None:
                yield f"{room.name}.operations"
