"""The engine ``jobs``: one job on each node, which starts slots there and is talked to over the agent's link.

The jobs are not one gang, which would end as a whole when one of them is lost. A thread for each host keeps it
connected; what happens is put into a queue, from which ``wait`` takes it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ugro.batch.engine import Answered, Event, Parts, SlotLost, SlotReady
from ugro.batch.frames import size_of
from ugro.batch.jobs.cluster import Cluster, Seat
from ugro.batch.jobs.connection import HostConnection
from ugro.batch.jobs.session import Kind, Message, Session
from ugro.batch.jobs.shipped import archive
from ugro.batch.local import cloudpickle_dumps
from ugro.core.errors import UgroError

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
