"""Which cluster file an agent serves; what ``ugro init`` asks about one, and what it wants in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ugro.core.support.destination import Destination


@dataclass(frozen=True, slots=True)
class ServedFile:
    path: Path | None  # None: the cluster is this machine alone
    is_found: bool = False  # in a folder, not named by the user: what it executes must be allowed


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A node that is reached by ssh."""

    name: str
    to: Destination

    @property
    def word(self) -> str:
        """As a user would write it."""
        to = self.to
        user, port = f"{to.user}@" if to.user else "", f":{to.port}" if to.port else ""
        return f"{user}[{to.host}]{port}" if port and ":" in to.host else f"{user}{to.host}{port}"


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A file as it is on disk."""

    hosts: tuple[KnownHost, ...]
    has_local: bool  # this machine is a node
    ssh_config: str | None  # the ssh configuration that it names

    def has(self, word: str) -> bool:
        """Whether a host, as the user or ssh's configuration names it, is a node already."""
        to = Destination.parse(word)
        return any(word == host.name or to == host.to for host in self.hosts)


@dataclass(frozen=True, slots=True)
class NewHost:
    word: str  # NAME, USER@HOST or USER@HOST:PORT
    remark: str  # a comment beside it
    same_as: str | None = None  # it is only a further name for this host


@dataclass(frozen=True, slots=True)
class ClusterWish:
    hosts: tuple[NewHost, ...]
    is_new: bool  # else they are added to what is there
    has_local: bool  # with this machine as a node
    ssh_config: str | None = None  # for a new file
