"""The nouns of an agent: its status, cluster file, events, findings of the doctor, backups, and where its state is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ugro.features.safe_mode.model import SafeMode
from ugro.kernel.support.errors import UsageError

# --- the status of an agent -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The agent did nothing else meanwhile: no command was answered, no job started or ended."""

    at: str
    seconds: float
    where: str  # in the agent's program, the innermost function first


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """All fields but the first two have defaults: an agent of another version may send fewer."""

    pid: int
    version: str
    generation: int = 0
    started_at: str = ""
    home: str = ""
    cluster_file: str | None = None  # None: the cluster is this machine alone
    cluster_found: bool = False  # in a folder, not named: what it executes must be allowed, also after an edit
    cluster_name: str = ""
    nodes: int = 0
    nodes_connected: int = 0
    running_commands: int = 0
    config_error: str | None = None  # of a broken edit; the last good configuration stays in force
    config_hint: str | None = None
    # The state is damaged, or its server does not answer: nothing is written, and jobs on the nodes keep running.
    state_error: str | None = None
    state_hint: str | None = None
    store: str = ""  # where the state is: a file, or the URL of a database
    last_backup: str | None = None  # when this agent made its last one
    backup_problem: str | None = None  # why it could make none
    disk_problem: str | None = None  # the disk of the state is full, or nearly
    disk_hint: str | None = None
    ignored_variables: tuple[str, ...] = ()  # settings that differ between the asking command and the agent
    safe_mode: SafeMode | None = None  # None: it is not in safe mode
    team_socket: str | None = None  # on which members of the team reach it
    team_problem: str | None = None  # why they do not, though there is a team
    api_url: str | None = None  # of the HTTPS API
    stood_still: StoodStill | None = None  # the last time that it did for seconds
    api_problem: str | None = None  # why it is not open, though it is configured


@dataclass(frozen=True, slots=True)
class DashboardLink:
    url: str  # lets one browser log in, once
    expires_s: float
    warning: str | None = None


# --- backups ----------------------------------------------------------------------------------------------------------
# A backup is one file, a SQLite database like the state itself.


@dataclass(frozen=True, slots=True)
class Backup:
    path: str
    made_at: str
    bytes: int
    schema: int
    version: str  # of the UGRO that made it
    jobs: int
    newest_job: int | None
    problem: str | None = None  # why it cannot be restored


@dataclass(frozen=True, slots=True)
class Restored:
    backup: Backup | None  # None: begun with an empty state
    aside: tuple[str, ...]  # what was there before, under its new name


# --- destinations of ssh ----------------------------------------------------------------------------------------------
# People write NAME, USER@HOST or USER@HOST:PORT, with brackets around IPv6 and a port. This only splits them; names are
# validated with the cluster file.


_PLACES = (
    re.compile(r"\[([^\[\]@]+)\](?::([0-9]{1,5}))?"),
    re.compile(r"([^:\[\]@]+)(?::([0-9]{1,5}))?"),
    re.compile(r"([0-9A-Fa-f:.]+(?:%\w+)?)()"),
)


@dataclass(frozen=True, slots=True)
class Destination:
    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, word: str) -> Destination:
        user, at, place = word.rpartition("@")
        found = next((match for form in _PLACES if (match := form.fullmatch(place))), None)
        is_user = not at or (user and "\n" not in user)
        if found is None or not is_user or (found[2] and not 1 <= int(found[2]) <= 65535):
            raise UsageError(f"{word!r} is not a host", hint="give NAME, USER@HOST or USER@HOST:PORT")
        return cls(found[1], user or None, int(found[2]) if found[2] else None)


# --- the cluster file that is served ----------------------------------------------------------------------------------


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
class ClusterFileWish:
    hosts: tuple[NewHost, ...]
    is_new: bool  # else they are added to what is there
    has_local: bool  # with this machine as a node
    ssh_config: str | None = None  # for a new file


# --- events -----------------------------------------------------------------------------------------------------------


PUT_BACK = "put back"  # the kind of what is said of files that earlier attempts made


@dataclass(frozen=True, slots=True)
class Event:
    seq: int
    at: str  # RFC 3339
    kind: str
    text: str
    job: int | None = None
    attempt: int | None = None
    node: str | None = None


# --- findings of the doctor -------------------------------------------------------------------------------------------
# A finding says what was checked, what was found, and what to do about it.


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str  # a node, a pair "a → b", "cluster", or "this machine": the one that the agent runs on
    check: str
    grade: Grade
    text: str
    remedy: str | None = None


# --- where the state is kept, for people ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreStatus:
    kind: str  # sqlite or postgresql
    where: str  # a file, or a URL without a password
    schema: int  # 0: nothing was written yet
    bytes: int
    version: str = ""  # of the server
    used_by: str | None = None  # the session that has the lock
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    where: str  # the state is now
    tables: int
    rows: int
    before: str  # what it was moved from; kept, and not used any more
