"""One slot's side: loads functions once, runs batches, answers. Travels by value: standard library only.

A batch is ``(number, function, start, (budget_s, most_bytes), forget, items)``. Its answer is the head
``(number, done, busy_s, failures, problem)`` and, after it, the results of the items that did not fail. ``done`` items
were run, the others are given back. A ``problem`` concerns the function itself, which cannot be loaded here, or the
batch, of which some item cannot.
"""

from __future__ import annotations

import sys
import time
import traceback
from functools import partial
from typing import Any

from ugro.batch.frames import attempt, dumped, loaded

IDLE = -1  # noted while no item runs
UNREADABLE = "Unreadable"  # the kind of a problem with the items of a batch, and not with its function


class Worker:
    def __init__(self, fetch: Any, note: Any, dumps: Any) -> None:
        """``fetch(name)``: the parts that were published. ``note[0]`` is memory that outlives this process."""
        self._fetch = fetch
        self._note = note
        self._dumps = dumps
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, Any] = {}
        note[0] = IDLE

    def answer(self, parts: Any) -> list[Any]:
        error, request = attempt(loaded, parts)
        if error is not None:
            return self._encoded((0, 0, 0.0, [], self._unreadable(error)), [])
        number, name, start, limits, forget, items = request
        for old in forget:
            self._functions.pop(old, None)
            self._shared.pop(old, None)
        error, function = attempt(self._function, name)
        if error is not None:
            return self._encoded((number, 0, 0.0, [], self._report(error)), [])
        began = time.perf_counter()
        results, failures, done = self._run(function, start, items, limits)
        busy_s = time.perf_counter() - began
        return self._packed(number, start, done, busy_s, failures, results)

    def has(self, name: str) -> bool:
        """Whether it is loaded, so that it is not fetched again."""
        return name in self._functions or name in self._shared

    def _run(self, function: Any, start: int, items: Any, limits: Any) -> Any:
        """Per item: the note, the call, the clock; this is what a small item costs on top.

        ``limits``: seconds, and the bytes of results as long as nobody knows how large they are, otherwise 0.
        """
        results: list[Any] = []
        failures: list[Any] = []
        note, clock, add = self._note, time.perf_counter, results.append
        deadline, room = clock() + limits[0], limits[1]
        index = start - 1
        for index, item in enumerate(items, start):
            note[0] = index
            try:
                add(function(item))
            except BaseException as error:  # noqa: BLE001  # also SystemExit: it concerns this item alone
                failures.append((index, self._report(error)))
            if clock() > deadline:
                break
            if room and results:
                room -= sys.getsizeof(results[-1], 64)
                if room <= 0:
                    break
        note[0] = IDLE
        return results, failures, index - start + 1

    def _packed(self, number: int, start: int, done: int, busy_s: float, failures: Any, results: Any) -> list[Any]:
        error, parts = attempt(self._encoded, (number, done, busy_s, failures, None), results)
        if error is None:
            return list(parts)
        # Some result cannot be pickled: find out which, the others are good.
        bad = {index for index, _ in failures}
        kept = []
        for index, result in zip((i for i in range(start, start + done) if i not in bad), results, strict=True):
            error, _ = attempt(self._dumps, result, None)
            if error is None:
                kept.append(result)
            else:
                text = f"its result of type {type(result).__name__} cannot be pickled: {_text(error)}"
                report = {**self._report(error), "kind": "Unpicklable", "message": text, "pickle": None}
                failures.append((index, report))
        return self._encoded((number, done, busy_s, sorted(failures, key=lambda one: one[0]), None), kept)

    def _encoded(self, head: Any, results: Any) -> list[Any]:
        return [self._dumps(head, None), *dumped(results, self._dumps)]

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            function, shared = loaded(self._fetch(name))
            for key in shared.values():
                if key not in self._shared:
                    self._shared[key] = loaded(self._fetch(key))
            values = {word: self._shared[key] for word, key in shared.items()}
            self._functions[name] = partial(function, **values) if values else function
        return self._functions[name]

    def _report(self, error: BaseException) -> dict[str, Any]:
        return {
            "kind": type(error).__name__,
            "message": _text(error),
            "traceback": "" if getattr(error, "explains_itself", False) else _trace(error),
            "pickle": self._pickled(error),
        }

    def _unreadable(self, error: BaseException) -> dict[str, Any]:
        text = f"the item cannot be loaded there: {type(error).__name__}: {_text(error)}"
        return {**self._report(error), "kind": UNREADABLE, "message": text, "pickle": None}

    def _pickled(self, error: BaseException) -> bytes | None:
        """The exception itself, if it can be pickled and loaded again."""
        problem, pickled = attempt(self._dumps, error, None)
        if problem is None:
            problem, _ = attempt(loaded, [pickled])
        return None if problem else bytes(pickled)


class Starred:
    """Calls a function with the parts of an item."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, item: Any, **shared: Any) -> Any:
        return self.function(*item, **shared)


class Applied:
    """Calls a function with the positional and the named arguments in an item."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, item: Any) -> Any:
        return self.function(*item[0], **item[1])


def _trace(error: BaseException) -> str:
    """Without our own frame, which is its first."""
    trace = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace.tb_next if trace is not None else None))


def _text(error: BaseException) -> str:
    problem, text = attempt(str, error)
    return "its message cannot be shown" if problem else str(text)
