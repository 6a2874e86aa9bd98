"""A pool's process on a node: starts slots there, as ``local`` does, and does what its pool asks over a socket.

It runs no code of the user itself. It outlives its connection, so that a cut costs no work, but not its pool: when
nobody has connected for some minutes, it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import time
from typing import Any

from ugro.features.batches.local import LocalEngine
from ugro.features.batches.model import Answered, Event, SlotLost
from ugro.features.batches.pipes import FOLDER_VARIABLE, FrameReader, Kind, Message, Outbox, Session

PATIENCE_S = float(os.environ.get("UGRO_POOL_PATIENCE_S", "300"))
_DEVICES = "CUDA_VISIBLE_DEVICES"


def main(listener: socket.socket, folder: str) -> None:
    host = Host(listener, folder)
    try:
        host.run()
    finally:
        host.close()


class Host:
    def __init__(self, listener: socket.socket, folder: str) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._published = os.path.join(folder, "published")
        self._slots = Slots()
        self._session, self._session_name = Session(), ""  # its name comes from the pool
        self._talk: _Talk | None = None
        self._names: dict[str, str] = {}  # what the pool calls it → what our engine does
        self._alone_since = time.monotonic()
        self._is_over = False
        self._reset()

    def run(self) -> None:
        while not self._is_over and (self._talk is not None or self._left_s() > 0):
            descriptors = {self._listener.fileno(): select.POLLIN, **(self._talk.waits if self._talk else {})}
            events, ready = self._slots.wait_also(descriptors, None if self._talk else self._left_s())
            for event in events:
                self._report(event)
            if self._listener.fileno() in ready:
                self._accept()
            elif self._talk is not None:
                self._hear(self._talk)

    def close(self) -> None:
        self._slots.close()
        if self._talk is not None:
            self._talk.connection.close()
        self._listener.close()

    # --- the connection ----------------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return self._alone_since + PATIENCE_S - time.monotonic()

    def _accept(self) -> None:
        """A new connection takes the place of the last one, which may not know yet that it was cut."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        if self._talk is not None:
            self._talk.connection.close()
        connection.setblocking(False)
        self._talk = _Talk(connection)
        hello = {"session": self._session_name, "received": self._session.received, "has_code": True}
        self._talk.send([json.dumps(hello).encode()])

    def _hear(self, talk: _Talk) -> None:
        talk.outbox.flush()
        frames, is_open = talk.reader.available()
        for frame in frames:
            if talk.is_greeted:
                message = self._session.read(frame)
                if message is not None:
                    self._obey(message)
            else:
                self._resume(talk, json.loads(bytes(frame[0])))
        if not is_open:
            talk.connection.close()
            self._talk = None
            self._alone_since = time.monotonic()

    def _resume(self, talk: _Talk, answer: dict[str, Any]) -> None:
        if answer["session"] != self._session_name:
            self._reset()
            self._session_name = answer["session"]
        talk.is_greeted = True
        for frame in self._session.again(int(answer["received"])):
            talk.send(frame)

    def _reset(self) -> None:
        """The pool has given up what was under way here."""
        self._slots.close()
        self._slots = Slots()
        self._session = Session()
        self._names.clear()
        shutil.rmtree(self._published, ignore_errors=True)
        os.makedirs(self._published, 0o700)
        os.environ[FOLDER_VARIABLE] = self._published

    def _say(self, kind: Kind, slot: int = 0, parts: Any = ()) -> None:
        frame = self._session.message(kind, slot, parts)
        if self._talk is not None and self._talk.is_greeted:
            self._talk.send(frame)

    # --- what the pool asks ------------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        kind, parts = message.kind, message.parts
        if kind is Kind.BATCH:
            self._slots.send_to(message.slot, parts)
        elif kind is Kind.START:
            self._slots.begin(message.slot)
        elif kind is Kind.END:
            self._slots.end_one(message.slot)
        elif kind is Kind.PUBLISH:
            self._publish(bytes(parts[0]).decode(), parts[1:])
        elif kind is Kind.WITHDRAW:
            self._withdraw(bytes(parts[0]).decode())
        elif kind is Kind.QUIT:
            self._is_over = True

    def _publish(self, name: str, parts: Any) -> None:
        """In memory that goes with this process; under a name that is the same on all nodes."""
        self._names[name] = self._slots.publish(parts)
        os.symlink(self._names[name].partition(":")[2], self._path(name))
        self._say(Kind.RECEIVED)  # so that the pool does not keep it

    def _withdraw(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))
        if name in self._names:
            self._slots.withdraw(self._names.pop(name))

    def _path(self, name: str) -> str:
        return os.path.join(self._published, name.partition(":")[2])

    def _report(self, event: Event) -> None:
        number = self._slots.number(event)
        if isinstance(event, Answered):
            self._say(Kind.ANSWER, number, event.parts)
        elif isinstance(event, SlotLost):
            how = {"reason": event.reason, "at": event.at, "is_innocent": event.is_innocent}
            self._say(Kind.LOST, number, [json.dumps(how).encode()])
        else:
            self._say(Kind.READY, number)


class _Talk:
    """One connection; nothing but a greeting is said before the pool has greeted."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader, self.outbox = FrameReader(connection), Outbox(connection)
        self.is_greeted = False

    @property
    def waits(self) -> dict[int, int]:
        return {self.connection.fileno(): select.POLLIN | (select.POLLOUT if self.outbox else 0)}

    def send(self, frame: Any) -> None:
        self.outbox.add(frame)
        self.outbox.flush()


class Slots(LocalEngine):
    """By the pool's numbers; each with a device of its own, if the job has devices."""

    def __init__(self) -> None:
        super().__init__(1)
        self._begun = 0  # by our own count, which is that of the engine
        self._theirs: dict[int, int] = {}
        self._ours: dict[int, int] = {}
        given = os.environ.get("UGRO_POOL_DEVICES", os.environ.get(_DEVICES, ""))
        os.environ["UGRO_POOL_DEVICES"] = given
        self._free = [device for device in given.split(",") if device]
        self._device: dict[int, str] = {}

    def begin(self, number: int) -> None:
        self._begun += 1
        self._theirs[self._begun], self._ours[number] = number, self._begun
        if self._free:
            os.environ[_DEVICES] = self._device[self._begun] = self._free.pop(0)
        self.replace()

    def send_to(self, number: int, parts: Any) -> None:
        self.send(self._ours.get(number, 0), parts)

    def end_one(self, number: int) -> None:
        self.end(self._ours.get(number, 0))

    def number(self, event: Event) -> int:
        if not isinstance(event, SlotLost):
            return self._theirs[event.slot]
        if event.slot in self._device:
            self._free.append(self._device.pop(event.slot))
        number = self._theirs.pop(event.slot)
        del self._ours[number]
        return number

    def wait_also(self, descriptors: dict[int, int], timeout_s: float | None) -> tuple[list[Event], set[int]]:
        """What happened to slots, and which of the others are ready."""
        poll, owners = select.poll(), {}
        for descriptor, waits in descriptors.items():
            poll.register(descriptor, waits)
        for slot in self._slots.values():
            poll.register(slot.connection, select.POLLIN | (select.POLLOUT if slot.outbox else 0))
            poll.register(slot.exit_fd, select.POLLIN)
            owners[slot.connection.fileno()] = owners[slot.exit_fd] = slot
        found = {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else max(0, 1000 * timeout_s))}
        happened = {id(owners[one]): owners[one] for one in found if one in owners}
        return [event for slot in happened.values() for event in self._looked_at(slot)], found - owners.keys()
