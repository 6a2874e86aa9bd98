"""The engine ``jobs``: one job on each node, which starts slots there and is talked to over the agent's link.

The jobs are not one gang, which would end as a whole when one of them is lost. A thread for each host keeps it
connected; what happens is put into a queue, from which ``wait`` takes it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import queue
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import ugro
from ugro.features.batches.local import cloudpickle_dumps
from ugro.features.batches.model import Answered, Event, Parts, SlotLost, SlotReady
from ugro.features.batches.pipes import FrameReader, Kind, Message, Session, head_of
from ugro.features.batches.worker import size_of
from ugro.kernel.support.errors import UgroError

# --- cluster ----------------------------------------------------------------------------------------------------------
# What the engine ``jobs`` needs of a cluster; the client has it.


@dataclass(frozen=True, slots=True)
class Seat:
    """So many slots on a node."""

    node: str
    slots: int


@dataclass(frozen=True, slots=True)
class HostJob:
    """Where the job of a host stands. One that neither runs nor is over waits for its start, or for the next one."""

    is_over: bool = False
    is_running: bool = False
    reason: str = ""


class ByteStream(Protocol):
    """One thread reads while another one writes."""

    def recv(self, most: int) -> bytes: ...

    def sendall(self, piece: bytes) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Cluster(Protocol):
    """Used by several threads. Raises ``UgroError``."""

    def submit(self, seats: Sequence[Seat]) -> list[int]:
        """A job for each, in order: their numbers."""

    def look(self, job: int) -> HostJob: ...

    def dial(self, node: str, job: int) -> ByteStream:
        """To the socket of the job's host."""

    def end(self, jobs: Sequence[int], grace_s: float) -> None:
        """Cancels those that do not end by themselves within this time, and waits until all have ended."""


# --- connection -------------------------------------------------------------------------------------------------------
# Frames over one connection to a host. Nobody waits to send: a thread does.


_READ = 256 * 1024
_JOINED = 64 * 1024  # smaller parts go together


class HostConnection:
    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._reader = FrameReader(_Reading(stream))  # type: ignore[arg-type]  # it only receives
        self._frames: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="pool: to a host", daemon=True)
        self._sender.start()

    def read(self) -> list[Any] | None:
        """The next frame; None when it was cut off."""
        return self._reader.wait()

    def send(self, frame: list[Any]) -> None:
        self._frames.put(frame)

    def abort(self) -> None:
        """Wakes the thread that reads, which closes it."""
        self._stream.abort()

    def close(self) -> None:
        self._frames.put(None)
        self._stream.abort()
        self._sender.join()
        self._stream.close()

    def _send(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                self._send_one(frame)
        except UgroError:
            self._stream.abort()  # who reads sees it

    def _send_one(self, frame: list[Any]) -> None:
        small = bytearray(head_of(frame))
        for part in frame:
            if len(part) <= _JOINED:
                small += part
                continue
            self._stream.sendall(bytes(small))
            small.clear()
            self._stream.sendall(part)
        if small:
            self._stream.sendall(bytes(small))


class _Reading:
    """As much of a socket as a reader of frames needs."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._left = memoryview(b"")

    def recv_into(self, target: memoryview) -> int:
        if not self._left:
            try:
                self._left = memoryview(self._stream.recv(_READ))
            except UgroError as error:
                raise ConnectionError(str(error)) from error
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


# --- shipped ----------------------------------------------------------------------------------------------------------
# What a host is made of: a short text that is its job's command, and an archive that its pool sends.
#
# The job's working directory is the user's, as with every job, so that the modules of a function are found there; our
# own code goes beside it.


SOCKET = "pool/host"  # in the run directory
_PARTS = ("features/batches", "kernel/support")  # of this package

# Listens, says who it is, and receives the archive; all else is in that. As short as can be: users see it in `ps`.
BOOT = """\
import json, os, socket, struct, sys
folder = os.path.join(os.environ["UGRO_RUN_DIR"], "pool")
os.makedirs(folder, 0o700)
listener = socket.socket(socket.AF_UNIX)
listener.bind("/proc/self/fd/%d/host" % os.open(folder, os.O_RDONLY))
listener.listen(8)
listener.settimeout(float(os.environ.get("UGRO_POOL_PATIENCE_S", "300")))
hello = json.dumps({"python": sys.version_info[:2], "has_code": False}).encode()
code, wanted = b"", -1
while len(code) != wanted:
    try:
        connection, _ = listener.accept()
    except socket.timeout:
        print("no pool has connected")
        sys.exit()
    connection.settimeout(60)
    with connection, connection.makefile("rb") as stream:
        try:
            connection.sendall(struct.pack("<IQ", 1, len(hello)) + hello)
            _, size, wanted = struct.unpack("<IQQ", stream.read(20))
            code = stream.read(size + wanted)[size:]
        except (OSError, struct.error):
            pass
with open(os.path.join(folder, "code.zip"), "wb") as file:
    file.write(code)
sys.path.insert(0, file.name)
from ugro.features.batches.host import main
main(listener, folder)
"""


@functools.cache
def archive() -> bytes:
    """Of UGRO what a host and its slots need, and cloudpickle, which is Python alone."""
    root = Path(ugro.__file__).parent
    above = [root / name for name in ("__init__.py", "features/__init__.py", "kernel/__init__.py", "kernel/feature.py")]
    files = [*above, *(file for part in _PARTS for file in sorted((root / part).rglob("*.py")))]
    found = {f"ugro/{file.relative_to(root)}": file for file in files}
    package = Path(str(getattr(find_spec("cloudpickle"), "origin", ""))).parent
    found |= {f"cloudpickle/{file.name}": file for file in sorted(package.glob("*.py"))}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as target:
        for name, file in found.items():
            target.write(file, name)
    return content.getvalue()


# --- engine -----------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_GRACE_S = 10.0  # a host that was cut off for longer loses its batches to others
_GIVE_UP_S = 300.0  # from then on it is not waited for; it ends by itself
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_SOON_BYTES = 1 << 20  # an answer of that size is acknowledged at once: the host keeps it until then
_QUIT_S = 20.0  # for hosts that were asked to end; most take a moment, on a busy machine some
_JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class _Host:
    seat: Seat
    job: int
    owed: int  # slots that the pool waits for, and that were not begun
    session: Session = field(default_factory=Session)
    session_name: str = ""  # empty before the first, and after its slots were given up
    connection: HostConnection | None = None
    slots: set[int] = field(default_factory=set)  # ready, or being started there
    is_dead: bool = False  # it does not come back
    problem: str = ""
    heard_at: float = field(default_factory=time.monotonic)

    @property
    def vacancies(self) -> int:
        return self.seat.slots - len(self.slots) - self.owed


class JobsEngine:
    name = "jobs"

    def __init__(self, cluster: Cluster, seats: Sequence[Seat]) -> None:
        self._cluster = cluster
        self._seats = seats
        self._hosts: list[_Host] = []
        self._threads: list[threading.Thread] = []
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of the hosts and all below
        self._published: dict[str, list[bytes]] = {}
        self._numbers = 0
        self._names = 0
        self._is_closed = threading.Event()
        self._dumps = cloudpickle_dumps()

    def dumps(self, value: Any, buffer_callback: Callable[[Any], Any] | None) -> bytes:
        return bytes(self._dumps(value, protocol=5, buffer_callback=buffer_callback))

    def start(self) -> int:
        jobs = self._cluster.submit(self._seats)
        self._hosts = [_Host(seat, job, seat.slots) for seat, job in zip(self._seats, jobs, strict=True)]
        for host in self._hosts:
            name = f"pool on {host.seat.node}"
            self._threads.append(threading.Thread(target=self._tend, args=(host,), name=name, daemon=True))
            self._threads[-1].start()
        return sum(seat.slots for seat in self._seats)

    def publish(self, parts: Parts) -> str:
        with self._lock:
            self._names += 1
            name = f"{self._names}:p{self._names}"
            self._published[name] = [bytes(part) for part in parts]
            for host in self._hosts:
                self._say(host, Kind.PUBLISH, 0, [name.encode(), *self._published[name]])
        return name

    def withdraw(self, name: str) -> None:
        with self._lock:
            del self._published[name]
            for host in self._hosts:
                self._say(host, Kind.WITHDRAW, 0, [name.encode()])

    def send(self, slot: int, parts: Parts) -> None:
        with self._lock:
            if (host := self._host_of(slot)) is not None:
                # Copied: it may be sent again, and its owner may change it meanwhile.
                self._say(host, Kind.BATCH, slot, [bytes(part) for part in parts])

    def end(self, slot: int) -> None:
        with self._lock:
            if (host := self._host_of(slot)) is not None:
                self._say(host, Kind.END, slot)

    def replace(self) -> None:
        """Where one was lost, best on a host that is there."""
        with self._lock:
            hosts = [host for host in self._hosts if not host.is_dead]
            if not hosts:
                self._numbers += 1
                self._events.put(SlotLost(self._numbers, self._why_none(), is_innocent=True))
                return
            best = max(hosts, key=lambda host: (host.vacancies > 0, host.connection is not None, host.vacancies))
            best.owed += 1
            if best.connection is not None:
                self._begin_owed(best)

    def wait(self, timeout_s: float | None) -> list[Event]:
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._events.get_nowait() if timeout_s == 0 else self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        return found

    def close(self) -> None:
        with self._lock:
            self._is_closed.set()
            for host in self._hosts:
                self._say(host, Kind.QUIT)
            is_reached = all(host.connection is not None for host in self._hosts if not host.is_dead)
        self._cluster.end([host.job for host in self._hosts], _QUIT_S if is_reached else 0.0)
        for host in self._hosts:
            if (connection := host.connection) is not None:
                connection.abort()
        for thread in self._threads:
            thread.join(_JOIN_S)

    # --- a host's thread ---------------------------------------------------------------------------------------

    def _tend(self, host: _Host) -> None:
        """Keeps it connected until it is over."""
        pause_s = _FIRST_PAUSE_S
        while not self._is_closed.is_set() and not host.is_dead:
            heard_at = host.heard_at
            try:
                self._visit(host)
            except UgroError as error:
                host.problem = str(error)
            except Exception as error:  # noqa: BLE001  # the top of a thread: the pool would wait for it for ever
                host.problem = f"invalid message from {host.seat.node}: {error!r:.100}"
                self._lose(host, host.problem)
            if host.heard_at > heard_at:
                pause_s = _FIRST_PAUSE_S
            cut_s = time.monotonic() - host.heard_at
            if cut_s > _GRACE_S:
                self._lose(host, f"{host.seat.node} was cut off: {host.problem}")
            if cut_s > _GIVE_UP_S and host.session.received:
                self._bury(host, host.problem)
            self._is_closed.wait(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def _visit(self, host: _Host) -> None:
        """Connects to it, if it is there, and stays until the connection is cut."""
        job = self._cluster.look(host.job)
        if job.is_over:
            self._bury(host, f"its job {host.job} ended: {job.reason}")
            return
        if not job.is_running:
            self._lose(host, job.reason)
            return
        connection = HostConnection(self._cluster.dial(host.seat.node, host.job))
        try:
            self._talk(host, connection)
        finally:
            with self._lock:
                host.connection = None
            connection.close()

    def _talk(self, host: _Host, connection: HostConnection) -> None:
        frame = connection.read()
        if frame is None:
            return
        hello = json.loads(bytes(frame[0]))
        try:
            if not hello["has_code"]:
                self._equip(host, connection, hello)
                return
            self._greet(host, connection, hello)
            while (frame := connection.read()) is not None:
                with self._lock:
                    if (message := host.session.read(frame)) is not None:
                        self._take(host, message)
            host.problem = "the connection was lost"
        finally:
            host.heard_at = time.monotonic()

    def _equip(self, host: _Host, connection: HostConnection, hello: dict[str, Any]) -> None:
        theirs, ours = tuple(hello["python"]), sys.version_info[:2]
        if theirs != ours:
            names = [".".join(map(str, version)) for version in (theirs, ours)]
            self._bury(host, f"its Python is {names[0]}, and this is {names[1]}: functions cannot be sent there")
            return
        connection.send([b"{}", archive()])
        connection.read()  # until it has all of it, and closes

    def _greet(self, host: _Host, connection: HostConnection, hello: dict[str, Any]) -> None:
        """A host that has another session than ours begins a new one: it is another process, or was given up.

        Or it has never heard of ours, as the connection was cut before.
        """
        with self._lock:
            is_fresh = not host.session_name or hello["session"] != host.session_name
            if is_fresh:
                self._lose(host, "its process was replaced")
                host.session, host.session_name = Session(), os.urandom(8).hex()
            answer = {"session": host.session_name, "received": host.session.received}
            connection.send([json.dumps(answer).encode()])
            for frame in [] if is_fresh else host.session.again(int(hello["received"])):
                connection.send(frame)
            host.connection = connection
            if is_fresh:
                for name, parts in self._published.items():
                    self._say(host, Kind.PUBLISH, 0, [name.encode(), *parts])
            self._begin_owed(host)

    def _take(self, host: _Host, message: Message) -> None:
        slot = message.slot
        if slot not in host.slots:
            return
        if message.kind is Kind.READY:
            self._events.put(SlotReady(slot, host.seat.node))
        elif message.kind is Kind.ANSWER:
            self._events.put(Answered(slot, message.parts))
            if size_of(message.parts) > _SOON_BYTES:
                self._say(host, Kind.RECEIVED)
        elif message.kind is Kind.LOST:
            host.slots.discard(slot)
            how = json.loads(bytes(message.parts[0]))
            self._events.put(SlotLost(slot, str(how["reason"]), how["at"], bool(how["is_innocent"])))

    def _lose(self, host: _Host, reason: str) -> None:
        """Its slots are given up; what it says of them later is not heard."""
        with self._lock:
            host.session_name = ""
            for slot in host.slots:
                self._events.put(SlotLost(slot, reason, is_innocent=True))
            host.slots.clear()

    def _bury(self, host: _Host, problem: str) -> None:
        with self._lock:
            self._lose(host, problem)
            host.is_dead, host.problem = True, problem
            if not self._is_closed.is_set():
                log.warning("the pool has lost %s: %s", host.seat.node, problem)
            if all(one.is_dead for one in self._hosts):
                for _ in range(sum(one.owed for one in self._hosts)):
                    self._numbers += 1
                    self._events.put(SlotLost(self._numbers, self._why_none(), is_innocent=True))
                for one in self._hosts:
                    one.owed = 0

    # --- with the lock held ------------------------------------------------------------------------------------

    def _begin_owed(self, host: _Host) -> None:
        while host.owed:
            host.owed -= 1
            self._numbers += 1
            host.slots.add(self._numbers)
            self._say(host, Kind.START, self._numbers)

    def _say(self, host: _Host, kind: Kind, slot: int = 0, parts: Sequence[bytes] = ()) -> None:
        """Now, or when it is connected again; to a host whose slots were given up, nothing."""
        if host.session_name:
            frame = host.session.message(kind, slot, parts)
            if host.connection is not None:
                host.connection.send(frame)

    def _host_of(self, slot: int) -> _Host | None:
        return next((host for host in self._hosts if slot in host.slots), None)

    def _why_none(self) -> str:
        problems = dict.fromkeys(f"{host.seat.node}: {host.problem}" for host in self._hosts if host.problem)
        return "; ".join(problems)
