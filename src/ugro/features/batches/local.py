"""The engine ``local``: processes on this machine, over sockets. Needs neither an agent nor Ray.

Each slot is a fresh Python (no fork: the driver may have threads) in a session of its own, so that Ctrl-C reaches the
driver alone. What is published lies in memory that belongs to the driver and goes with it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from ugro.features.batches.model import Answered, Event, FunctionUnusable, Parts, SlotLost, SlotReady
from ugro.features.batches.pipes import FrameReader, Outbox, write_file
from ugro.kernel.support.errors import Unsatisfiable

_PATH_VARIABLE = "UGRO_BATCH_PATH"
_BOOT = (
    f"import os, sys; sys.path[:] = os.environ.pop('{_PATH_VARIABLE}').split(os.pathsep)\n"
    "from ugro.features.batches.pipes import main; main(*map(int, sys.argv[1:]))"
)
_NOTE_BYTES = 8
_IDLE = -1
_GOODBYE_S = 1.0  # for idle slots to end by themselves


def cores() -> int:
    return len(os.sched_getaffinity(0))


class LocalEngine:
    name = "local"

    def __init__(self, workers: int | None = None, stdout: IO[Any] | None = None) -> None:
        """``stdout``: of the slots; None: that of the driver."""
        self._workers = workers or cores()
        self._stdout = stdout
        self._node = socket.gethostname()
        self._slots: dict[int, _Slot] = {}
        self._published: dict[str, int] = {}
        self._started = 0
        self._names = 0
        self._events: list[Event] = []
        self._dumps = cloudpickle_dumps()

    def dumps(self, value: Any, buffer_callback: Callable[[Any], Any] | None) -> bytes:
        return bytes(self._dumps(value, protocol=5, buffer_callback=buffer_callback))

    def start(self) -> int:
        for _ in range(self._workers):
            self.replace()
        return self._workers

    def replace(self) -> None:
        self._started += 1
        try:
            self._slots[self._started] = _started(self._started, self._stdout)
        except OSError as error:
            what = f"process {len(self._slots) + 1} of the pool cannot be started: {(error.strerror or '').lower()}"
            raise Unsatisfiable(what, hint="use fewer workers; see: ulimit -n and ulimit -u") from error

    def publish(self, parts: Parts) -> str:
        descriptor = os.memfd_create("ugro-batch", os.MFD_CLOEXEC)
        try:
            write_file(descriptor, parts)
        except OSError as error:
            os.close(descriptor)
            hint = "share less, or read it in the function from a file"
            raise FunctionUnusable(f"no memory for what is shared: {error.strerror}", hint=hint) from error
        self._names += 1
        name = f"{self._names}:/proc/{os.getpid()}/fd/{descriptor}"
        self._published[name] = descriptor
        return name

    def withdraw(self, name: str) -> None:
        os.close(self._published.pop(name))

    def send(self, slot: int, parts: Parts) -> None:
        if slot in self._slots:
            self._slots[slot].outbox.add(parts)
            self._slots[slot].outbox.flush()

    def end(self, slot: int) -> None:
        if slot in self._slots:
            self._slots[slot].kill()

    def wait(self, timeout_s: float | None) -> list[Event]:
        poll, owners = select.poll(), {}
        for slot in self._slots.values():
            waits = select.POLLIN | (select.POLLOUT if slot.outbox else 0)
            poll.register(slot.connection, waits)
            poll.register(slot.exit_fd, select.POLLIN)
            owners[slot.connection.fileno()] = owners[slot.exit_fd] = slot
        limit_ms = None if timeout_s is None else max(0, round(1000 * timeout_s))
        happened = {id(owners[descriptor]): owners[descriptor] for descriptor, _ in poll.poll(limit_ms)}
        return [event for slot in happened.values() for event in self._looked_at(slot)]

    def _looked_at(self, slot: _Slot) -> list[Event]:
        slot.outbox.flush()
        has_ended = slot.has_ended()  # before the last read: what it sent before its end counts
        frames, _ = slot.frames.available()
        events: list[Event] = []
        for parts in frames:
            events.append(Answered(slot.number, parts) if slot.is_ready else SlotReady(slot.number, self._node))
            slot.is_ready = True
        if has_ended:
            del self._slots[slot.number]
            events.append(slot.buried())
        return events

    def close(self) -> None:
        for slot in self._slots.values():
            slot.connection.shutdown(socket.SHUT_RDWR)  # an idle one ends by itself
        deadline = time.monotonic() + _GOODBYE_S
        for slot in self._slots.values():
            if slot.is_idle():
                slot.has_ended(max(0.0, deadline - time.monotonic()))
            slot.kill()
            slot.buried()
        self._slots.clear()
        for descriptor in self._published.values():
            os.close(descriptor)
        self._published.clear()


@dataclass(slots=True)
class _Slot:
    number: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    life: socket.socket  # the slot ends when it is closed
    note: mmap.mmap
    exit_fd: int
    frames: FrameReader = field(init=False)
    outbox: Outbox = field(init=False)
    is_ready: bool = False

    def __post_init__(self) -> None:
        self.frames, self.outbox = FrameReader(self.connection), Outbox(self.connection)

    def at(self) -> int | None:
        found = int.from_bytes(self.note[:_NOTE_BYTES], sys.byteorder, signed=True)
        return None if found == _IDLE else found

    def is_idle(self) -> bool:
        return self.is_ready and self.at() is None

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self.exit_fd, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def kill(self) -> None:
        """Also what it started. Its number cannot be another's: it is not waited for before ``buried``."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def buried(self) -> SlotLost:
        self.kill()
        code = self.process.wait()
        lost = SlotLost(self.number, _how(code), self.at(), is_innocent=not self.is_ready)
        self.connection.close()
        self.life.close()
        os.close(self.exit_fd)
        self.note.close()
        return lost


def _started(number: int, stdout: IO[Any] | None) -> _Slot:
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as unless_started:
        ours, their_connection = _pair(unless_started, theirs)
        life, their_life = _pair(unless_started, theirs)
        note_fd = os.memfd_create("ugro-note", os.MFD_CLOEXEC)
        theirs.callback(os.close, note_fd)
        os.write(note_fd, _IDLE.to_bytes(_NOTE_BYTES, sys.byteorder, signed=True))
        note = unless_started.enter_context(mmap.mmap(note_fd, _NOTE_BYTES))
        descriptors = (their_connection.fileno(), their_life.fileno(), note_fd)
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            pass_fds=descriptors,
            env=_environment(),
            start_new_session=True,
        )
        unless_started.callback(process.wait)
        unless_started.callback(process.kill)
        ours.setblocking(False)
        slot = _Slot(number, process, ours, life, note, os.pidfd_open(process.pid))
        unless_started.pop_all()
    return slot


def _pair(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    return ours.enter_context(one), theirs.enter_context(other)


def _environment() -> dict[str, str]:
    """One thread per slot in numeric libraries, unless the user has said otherwise: there is a slot for each core."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"OMP_NUM_THREADS": "1", **os.environ, _PATH_VARIABLE: path}


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    names = {one.value: one.name for one in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def cloudpickle_dumps() -> Callable[..., Any]:
    try:
        import cloudpickle
    except ImportError as error:
        raise FunctionUnusable("cloudpickle is not installed", hint="pip install 'ugro[batch]'") from error
    dumps: Callable[..., Any] = cloudpickle.dumps
    return dumps
