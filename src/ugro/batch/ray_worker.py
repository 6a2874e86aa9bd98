"""A slot on Ray: an actor. Travels by value, as its node need not have UGRO."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from typing import Any

from ugro.batch.frames import unwrapped, wrapped
from ugro.batch.worker import IDLE, Worker

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
        return wrapped(self._worker.answer(unwrapped(parts)))

    def _fetch(self, name: str) -> Any:
        import ray

        # The values lie in the object store and stay there as long as they are used, without the reference.
        (reference,) = self._references.pop(name)
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
