"""A slot on this machine: a process of its own, which ends with its driver. Started by ``local``."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import socket
import sys
from typing import Any

from ugro.batch.pipes import FrameReader, Outbox, split
from ugro.batch.worker import Worker

_NOTE_BYTES = 8
FOLDER_VARIABLE = "UGRO_BATCH_FOLDER"  # where published things are whose names are no absolute paths
_FOLDER = os.environ.get(FOLDER_VARIABLE, "/")


def main(connection_fd: int, life_fd: int, note_fd: int) -> None:
    for descriptor in (connection_fd, life_fd, note_fd):
        os.set_inheritable(descriptor, False)
    _end_with(life_fd)
    note = memoryview(mmap.mmap(note_fd, _NOTE_BYTES)).cast("q")
    import cloudpickle  # of the extra "batch"

    def dumps(value: Any, buffer_callback: Any) -> bytes:
        return bytes(cloudpickle.dumps(value, protocol=5, buffer_callback=buffer_callback))

    with socket.socket(fileno=connection_fd) as connection:
        worker = Worker(_fetch, note, dumps)
        frames, outbox = FrameReader(connection), Outbox(connection)
        _send(outbox, [b"ready"])
        while (parts := frames.wait()) is not None:
            _send(outbox, worker.answer(parts))
            parts = None  # not kept while the next batch is waited for
    sys.exit(0)


def _send(outbox: Outbox, parts: Any) -> None:
    outbox.add(parts)
    outbox.flush()


def _end_with(life_fd: int) -> None:
    """The kernel kills this process and all that it started when the driver's end of this socket closes.

    Not a thread, which an item that holds the interpreter's lock would stop, and not the parent-death signal, which
    comes when the *thread* that started this process ends.
    """
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(life_fd, select.POLLIN)
    if poll.poll(0):  # it was closed before
        os.killpg(0, signal.SIGKILL)


def _fetch(name: str) -> list[memoryview]:
    with open(os.path.join(_FOLDER, name.partition(":")[2]), "rb") as file:
        return split(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
