"""The operations that there are: the request classes of each module listed here."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from ugro.kernel.operations.request import Request

MODULES = ("ugro.kernel.access.operations",)


@cache
def requests() -> tuple[type[Request[Any]], ...]:
    """Returns every request class. Raises if two have the same route or name."""
    found: dict[str, type[Request[Any]]] = {}
    for name in MODULES:
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
