"""The systemd unit of an agent, as text.

A restart of the unit must never end a job. Jobs of a node that is this machine run below the agent, in its unit: so
systemd ends the agent's own process and nothing else, and does not end the agent when a job runs out of memory. What a
sandbox takes from the agent it takes from those jobs, too. So there is one only where the agent starts no jobs itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMMON = """\
Type=notify
NotifyAccess=main
Restart=on-failure
RestartSec=5
TimeoutStartSec=120
TimeoutStopSec=60
UMask=0077
# Jobs and their supervisors outlive the agent.
KillMode=process
OOMPolicy=continue
"""

_JOBS_HERE = """\
# This machine is a node: its jobs run in this unit. No sandbox, because it would hold for them as well.
Delegate=yes
TasksMax=infinity
"""

# What a user's own systemd can do without privileges, too.
_SANDBOX = """\
# This machine runs no jobs of the agent's: it needs to reach the nodes, and to write its state.
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
"""

_SYSTEM_SANDBOX = """\
PrivateTmp=yes
PrivateDevices=yes
ProtectSystem=strict
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
CapabilityBoundingSet=
AmbientCapabilities=
RemoveIPC=no
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """``user``: of a unit of the whole system; None: a unit of the user's own systemd."""

    home: Path
    argv: tuple[str, ...]
    user: str | None = None
    runs_jobs: bool = True
    writable: tuple[Path, ...] = ()  # folders besides ``home`` that the agent may change

    @property
    def name(self) -> str:
        return "ugro-agent.service" if self.user is None else f"ugro-agent-{self.user}.service"

    @property
    def first_line(self) -> str:
        return first_line(self.home)

    def text(self) -> str:
        return "\n".join([self.first_line, *self._unit(), "", *self._service(), "", *self._install(), ""])

    def _unit(self) -> Iterator[str]:
        yield "# Change it with `systemctl edit`: `ugro agent install` writes this file again."
        yield "[Unit]"
        yield "Description=UGRO agent"
        if self.user is not None:
            yield "Wants=network-online.target"
            yield "After=network-online.target"
        yield "StartLimitIntervalSec=0"

    def _service(self) -> Iterator[str]:
        yield "[Service]"
        yield f"ExecStart={' '.join(quoted(word) for word in self.argv)}"
        if self.user is not None:
            yield f"User={self.user}"
            # For the team's socket: the sandbox has a /tmp of its own, where nobody else finds it.
            yield f"RuntimeDirectory=ugro-{self.user}"
            yield "RuntimeDirectoryMode=0750"
        yield from _COMMON.splitlines()
        if self.runs_jobs:
            yield from _JOBS_HERE.splitlines()
            return
        yield from _SANDBOX.splitlines()
        if self.user is not None:
            yield from _SYSTEM_SANDBOX.splitlines()
            folders = (f"-{folder}" for folder in self.writable)
            yield f"ReadWritePaths={' '.join(quoted(word) for word in (str(self.home), *folders))}"

    def _install(self) -> Iterator[str]:
        yield "[Install]"
        yield f"WantedBy={'default.target' if self.user is None else 'multi-user.target'}"


def first_line(home: Path) -> str:
    """By which a unit is recognized as ours, and as that of this state directory."""
    return f"# Written by `ugro agent install`: the agent of {str(home)!r}"


def quoted(word: str) -> str:
    """One word of a command line in a unit file, which the file's own substitutions leave alone."""
    plain = word.replace("%", "%%").replace("$", "$$")
    if plain and all(letter.isalnum() or letter in "/._-:=+@,%$" for letter in plain):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def command(python: str, home: Path, cluster: Path | None) -> Sequence[str]:
    """What starts the agent: with the file that the last one served, else with this one."""
    named = ("--cluster", str(cluster)) if cluster is not None else ()
    return (python, "-P", "-m", "ugro.agent", "--home", str(home), *named, "--continue")
