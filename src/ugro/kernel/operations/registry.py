"""The operations that there are: the request classes in ``operations.py`` of each room and feature."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from ugro import kernel
from ugro.kernel.feature import installed
from ugro.kernel.operations.request import Request


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
    rooms = [room.name for room in iter_modules(kernel.__path__, f"{kernel.__name__}.") if room.ispkg]
    for package in (*rooms, *(feature.package for feature in installed())):
        if find_spec(f"{package}.operations") is not None:
            yield f"{package}.operations"
