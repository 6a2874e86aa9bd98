"""A function of a script, as ``ugro map script.py:function`` runs it. Travels by value: standard library only.

Items and results are JSON texts: they are read and written where the function runs, and the driver only passes them on.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from typing import Any


class ScriptFunction:
    """The script travels as text, and is run once per process, as a module of its own: what it caches stays cached."""

    def __init__(self, path: str, source: str, name: str) -> None:
        self.path, self.source, self.name = path, source, name
        self._function: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "source": self.source, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._function = _loaded(self.path, self.source, self.name)

    def __call__(self, line: str, **shared: Any) -> str:
        result = self._function(_value(line), **shared)
        try:
            return json.dumps(result)
        except (TypeError, ValueError, RecursionError) as error:
            raise NotJson(f"its result of type {type(result).__name__} is not JSON: {error}") from None


class NotJson(ValueError):
    """No code of the user's has failed, so no traceback explains it."""

    explains_itself = True


class Timed:
    """Calls a function, and returns how long it took and how large its result is."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, item: Any, **shared: Any) -> tuple[float, int]:
        began = time.perf_counter()
        result = self.function(item, **shared)
        return time.perf_counter() - began, sys.getsizeof(result, 64)


def _value(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotJson(f"the line of the input is not JSON: {error}") from None


def returned(item: Any) -> Any:
    """Costs nothing: what remains is what a pool costs."""
    return item


def _loaded(path: str, source: str, name: str) -> Any:
    folder, file = os.path.split(path)
    if folder not in sys.path and os.path.isdir(folder):
        sys.path.insert(0, folder)  # its neighbours, where they are
    title = os.path.splitext(file)[0]
    module = types.ModuleType(title if title not in sys.modules else f"ugro_map_{title}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec"), module.__dict__)
    if not callable(getattr(module, name, None)):
        names = [key for key, value in vars(module).items() if isinstance(value, types.FunctionType)]
        raise AttributeError(f"{file} has no function {name!r}; it has: {', '.join(names) or 'none'}")
    return getattr(module, name)
