"""Machines that were found and need not be nodes (yet): what their sources say, and where each of them stands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine that a source lists, with checked fields: none of them can be an option or a command to ssh."""

    name: str
    host: str  # what ssh connects to
    user: str | None = None
    port: int | None = None
    labels: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # the kinds of sources that list it, such as zookeeper

    @property
    def reach(self) -> tuple[str, str | None, int | None]:
        """What a link to it depends on."""
        return self.host, self.user, self.port


@dataclass(frozen=True, slots=True)
class Member:
    """A node that joined by itself. It is kept here until it has left its source and is idle."""

    candidate: Candidate
    has_left: bool = False  # it takes no new jobs

    @property
    def name(self) -> str:
        return self.candidate.name


class Standing(StrEnum):
    NEW = "new"  # not a node
    NODE = "node"  # the cluster file lists it
    JOINED = "joined"  # a node by itself
    LEFT = "left"  # the same, and no source lists it any more


@dataclass(frozen=True, slots=True)
class Found:
    """A line of ``ugro node discover``."""

    candidate: Candidate
    standing: Standing
    target: str  # what a person would type after ``ssh``
    node: str | None = None  # the name of the node that it is
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SourceState:
    name: str  # its key in the cluster file
    place: str  # where it looks
    found: int = 0
    error: str | None = None  # why it cannot be read now; what it said last still holds
    hint: str | None = None
    read_at: str | None = None  # when it was read last, RFC 3339
    refused: tuple[str, ...] = ()  # entries that cannot be used, and why


@dataclass(frozen=True, slots=True)
class Discovered:
    join: str  # ask or auto
    sources: tuple[SourceState, ...] = ()
    found: tuple[Found, ...] = ()
