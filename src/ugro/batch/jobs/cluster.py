"""What the engine ``jobs`` needs of a cluster; the client has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
