"""Messages between a pool and a host: each arrives once and in order, over one connection after the other.

A message is kept until the other side has said that it has it. After a cut each side says what it has, and the rest is
sent again: a link that was lost for a moment, or an agent that was killed, costs no batch. Runs on nodes too.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import IntEnum
from typing import Any

_HEAD = struct.Struct("<QQBQ")  # its number, the newest one that we have, its kind, the slot


class Kind(IntEnum):
    # From the pool to the host.
    START = 1  # a slot of that number
    BATCH = 2  # for the slot
    END = 3  # the slot
    PUBLISH = 4  # parts under the name in the first one
    WITHDRAW = 5
    QUIT = 6
    # From the host to the pool.
    READY = 10  # the slot
    ANSWER = 11  # of the slot
    LOST = 12  # the slot; how is in the first part, as JSON
    RECEIVED = 13  # nothing else is said


class Message:
    __slots__ = ("kind", "parts", "slot")

    def __init__(self, kind: Kind, slot: int, parts: Any) -> None:
        self.kind = kind
        self.slot = slot
        self.parts = parts


class Session:
    def __init__(self) -> None:
        self.received = 0
        self._sent = 0
        self._kept: deque[tuple[int, list[Any]]] = deque()

    def message(self, kind: Kind, slot: int = 0, parts: Any = ()) -> list[Any]:
        """As parts of a frame; kept until it has arrived."""
        self._sent += 1
        frame = [_HEAD.pack(self._sent, self.received, kind, slot), *parts]
        self._kept.append((self._sent, frame))
        return frame

    def read(self, frame: Any) -> Message | None:
        """None: it came before the cut already."""
        number, received, kind, slot = _HEAD.unpack(frame[0])
        self._forget(received)
        if number <= self.received:
            return None
        if number != self.received + 1:
            raise ValueError(f"message {number} after {self.received}")
        self.received = number
        return Message(Kind(kind), slot, frame[1:])

    def again(self, received: int) -> list[list[Any]]:
        """What the other side does not have, after it said what it has."""
        self._forget(received)
        return [frame for _, frame in self._kept]

    def _forget(self, received: int) -> None:
        while self._kept and self._kept[0][0] <= received:
            self._kept.popleft()
