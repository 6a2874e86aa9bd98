"""The status of an agent, as it reports it."""

from __future__ import annotations

from dataclasses import dataclass

from ugro.core.safe_mode import SafeMode


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
