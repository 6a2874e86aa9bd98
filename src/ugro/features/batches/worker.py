"""One slot's side: loads functions once, runs batches, answers. Travels by value: standard library only.

A batch is ``(number, function, start, (budget_s, most_bytes), forget, items)``. Its answer is the head
``(number, done, busy_s, failures, problem)`` and, after it, the results of the items that did not fail. ``done`` items
were run, the others are given back. A ``problem`` concerns the function itself, which cannot be loaded here, or the
batch, of which some item cannot.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
import types
from functools import partial
from typing import Any

# --- frames -----------------------------------------------------------------------------------------------------------
# Batches and answers as buffers. Runs on slots too: standard library only.
#
# Pickle runs what it loads. What is loaded here comes from the user's own processes alone: a pool's driver and the
# slots that it started, over pipes, files and clusters that belong to the same user. Nothing from the agent, from a
# job's files or from another user ever gets here.


_IN_BAND = 32 * 1024  # smaller buffers are not worth a part of their own


def dumped(value: Any, dumps: Any) -> list[Any]:
    """The pickle, and after it the large buffers inside (arrays), which are not copied."""
    buffers: list[Any] = []

    def take(buffer: Any) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if view.nbytes < _IN_BAND:
            return True
        buffers.append(view)
        return False

    return [dumps(value, take), *buffers]


def loaded(parts: Any) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def size_of(parts: Any) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def wrapped(parts: Any) -> list[Any]:
    """So that Ray carries them beside its own pickle, without copies."""
    return [pickle.PickleBuffer(part) for part in parts]


def unwrapped(parts: Any) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def attempt(call: Any, *arguments: Any) -> tuple[BaseException | None, Any]:
    """The error, or None and what the call returned: for what the user's objects do when they are pickled or loaded."""
    try:
        return None, call(*arguments)
    except KeyboardInterrupt:  # the user's, and not the object's
        raise
    except BaseException as error:  # noqa: BLE001  # what it is, only the user's object knows
        return error, None


# --- worker -----------------------------------------------------------------------------------------------------------


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


# --- ray worker -------------------------------------------------------------------------------------------------------
# A slot on Ray: an actor. Travels by value, as its node need not have UGRO.


_NOTE_BYTES = 8
NODE_LABEL = "ugro-node"  # of the Ray nodes that UGRO starts


class RayWorker:
    def __init__(self) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="ugro-note-")
        os.write(descriptor, bytes(_NOTE_BYTES))
        note = memoryview(mmap.mmap(descriptor, _NOTE_BYTES)).cast("q")
        os.close(descriptor)
        self._references: dict[str, Any] = {}
        self._worker = Worker(self._fetch, note, _dumps)

    def where(self) -> tuple[str, str, str]:
        """The node as people call it, its Ray id, and the file with the note."""
        import ray

        context = ray.get_runtime_context()
        name = context.get_node_labels().get(NODE_LABEL) or socket.gethostname()
        return name, context.get_node_id(), self._path

    def work(self, parts: Any, references: dict[str, Any]) -> Any:
        """``references``: of what was published since the last call."""
        self._references.update(references)
        answer = wrapped(self._worker.answer(unwrapped(parts)))
        # The values lie in the object store and stay there as long as they are used, without the reference.
        self._references = {name: one for name, one in self._references.items() if not self._worker.has(name)}
        return answer

    def remove_note(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _fetch(self, name: str) -> Any:
        import ray

        (reference,) = self._references[name]
        return unwrapped(ray.get(reference))


def read_note(path: str) -> int | None:
    """Of an actor on this node that ended; its file goes with it."""
    import sys

    with open(path, "rb") as file:
        found = int.from_bytes(file.read(_NOTE_BYTES), sys.byteorder, signed=True)
    os.unlink(path)
    return None if found == IDLE else found


def _dumps(value: Any, buffer_callback: Any) -> bytes:
    from ray import cloudpickle

    return bytes(cloudpickle.dumps(value, protocol=5, buffer_callback=buffer_callback))


# --- script -----------------------------------------------------------------------------------------------------------
# A function of a script, as ``ugro map script.py:function`` runs it. Travels by value: standard library only.
#
# Items and results are JSON texts: they are read and written where the function runs, and the driver only passes them
# on.


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
