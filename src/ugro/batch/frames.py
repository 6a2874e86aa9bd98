"""Batches and answers as buffers. Runs on slots too: standard library only.

Pickle runs what it loads. What is loaded here comes from the user's own processes alone: a pool's driver and the slots
that it started, over pipes, files and clusters that belong to the same user. Nothing from the agent, from a job's files
or from another user ever gets here.
"""

from __future__ import annotations

import pickle
from typing import Any

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
