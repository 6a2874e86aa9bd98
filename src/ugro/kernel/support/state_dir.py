"""The folder in which an agent keeps its state and where clients find it: by default ``~/.ugro``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ugro.kernel.support.errors import UgroError

CLUSTER_FILE = "cluster.yaml"
CLUSTER_VARIABLE = "UGRO_CLUSTER"
SOCKET_VARIABLE = "UGRO_SOCKET"  # of members of a team: the socket of an agent that somebody else runs


def team_socket(env: Mapping[str, str], *, owner: str, is_root: bool, configured: str | None = None) -> Path:
    """Where an agent puts the socket for its team: in a folder of its own, as the state directory stays private.

    ``configured``: ``team.socket`` of the cluster file. A systemd unit with a RuntimeDirectory names that folder.
    """
    if configured:
        return Path(configured)
    if folder := env.get("RUNTIME_DIRECTORY", "").partition(":")[0]:
        return Path(folder, "agent.sock")
    return Path("/run/ugro/agent.sock") if is_root else Path(f"/tmp/ugro-{owner}/agent.sock")


def chosen_socket(env: Mapping[str, str]) -> Path | None:
    """The socket that a client was told to use (``UGRO_SOCKET``); None: that of its own state directory."""
    chosen = env.get(SOCKET_VARIABLE)
    return Path(os.path.abspath(os.path.expanduser(chosen))) if chosen else None


@dataclass(frozen=True, slots=True)
class StateDir:
    path: Path

    @classmethod
    def find(cls, env: Mapping[str, str]) -> StateDir:
        # Not Path.expanduser, which fails for an unknown user; here the folder simply does not exist.
        chosen = env.get("UGRO_HOME") or os.path.join(env.get("HOME") or "~", ".ugro")
        return cls(Path(os.path.abspath(os.path.expanduser(chosen))))

    def unusable(self, error: OSError) -> UgroError:
        return UgroError(
            f"{self.path} cannot be used: {(error.strerror or str(error)).lower()}",
            hint="UGRO keeps its state there; UGRO_HOME=DIR chooses another folder",
        )

    @property
    def socket(self) -> Path:
        return self.path / "agent.sock"

    @property
    def lock(self) -> Path:
        return self.path / "agent.lock"

    @property
    def served_cluster(self) -> Path:
        """A link to the cluster file that the agent serves or served last, until ``ugro agent stop``."""
        return self.path / "agent.cluster"

    @property
    def served_found(self) -> Path:
        """The same link, for a file that was found in a folder: it needs the user's allowance."""
        return self.path / "agent.cluster.found"

    @property
    def allowances(self) -> Path:
        """Which cluster files of folders the user has allowed."""
        return self.path / "allowed.json"

    @property
    def allowed_ssh_config(self) -> Path:
        """A copy of the ssh configuration that an allowed cluster file names, as it was allowed."""
        return self.path / "allowed.ssh_config"

    @property
    def log(self) -> Path:
        return self.path / "agent.log"

    @property
    def errors(self) -> Path:
        """What an agent printed before its log was open."""
        return self.path / "agent.err"

    @property
    def database(self) -> Path:
        return self.path / "state.db"

    @property
    def store(self) -> Path:
        """Names the database that is used instead of that file, if there is one."""
        return self.path / "store.yaml"

    @property
    def reserve(self) -> Path:
        """Space that is kept for the state."""
        return self.path / "reserve"

    @property
    def backups(self) -> Path:
        """Copies of the state that the agent makes."""
        return self.path / "backups"

    @property
    def identity(self) -> tuple[Path, ...]:
        """Files that a backup holds besides the state: what the agent needs to be the same one again."""
        return (self.key,)

    @property
    def key(self) -> Path:
        """By which the agent recognizes what it has left on nodes."""
        return self.path / "agent.key"

    @property
    def mark(self) -> Path:
        """How far the state has come; outside the state, so that an older one is recognized."""
        return self.path / "agent.mark"

    @property
    def journal(self) -> Path:
        """The newest attempt of every job and how it ended; for the same purpose."""
        return self.path / "agent.journal"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.db"

    @property
    def jobs(self) -> Path:
        """The logs and results of each job."""
        return self.path / "jobs"

    @property
    def contents(self) -> Path:
        """The code of jobs, as it was submitted."""
        return self.path / "contents"

    @property
    def folders(self) -> Path:
        """The folders that jobs name, as they were submitted."""
        return self.path / "folders"

    @property
    def python(self) -> Path:
        """What Python environments of jobs are made with."""
        return self.path / "python"

    @property
    def lab(self) -> Path:
        return self.path / "lab"

    @property
    def lab_cluster(self) -> Path:
        return self.lab / CLUSTER_FILE
