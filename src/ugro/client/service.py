"""The agent as a service of systemd: installed, started and removed with ``systemctl``."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError
from ugro.kernel.support.state_dir import StateDir

# --- unit -------------------------------------------------------------------------------------------------------------
# The systemd unit of an agent, as text.
#
# A restart of the unit must never end a job. Jobs of a node that is this machine run below the agent, in its unit: so
# systemd ends the agent's own process and nothing else, and does not end the agent when a job runs out of memory. What
# a sandbox takes from the agent it takes from those jobs, too. So there is one only where the agent starts no jobs
# itself.


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
    return (python, "-P", "-m", "ugro.kernel.agent", "--home", str(home), *named, "--continue")


# --- service ----------------------------------------------------------------------------------------------------------


SYSTEM_UNITS = Path("/etc/systemd/system")
_LINGER = Path("/var/lib/systemd/linger")
_LONGEST_S = 150.0  # longer than the start of an agent may take


@dataclass(frozen=True, slots=True)
class Service:
    path: Path
    is_system: bool

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def command(self) -> str:
        """What a person types before the verb."""
        return "sudo systemctl" if self.is_system else "systemctl --user"

    @classmethod
    def of_user(cls, env: Mapping[str, str]) -> Service:
        home = env.get("HOME") or os.path.expanduser("~")
        folder = Path(env.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"))
        return cls(folder / "systemd/user/ugro-agent.service", is_system=False)

    @classmethod
    def of_system(cls, user: str) -> Service:
        return cls(SYSTEM_UNITS / f"ugro-agent-{user}.service", is_system=True)

    def is_for(self, home: StateDir) -> bool:
        """Whether it is installed, and runs the agent of this state directory."""
        return self._first_line() == first_line(home.path)

    def install(self, unit: Unit) -> bool:
        """False when it was installed just so before. Started again only if something has changed."""
        self.expect_ours(unit.home)
        self._systemctl("show", "--property=Version")  # before anything is written
        before = self._read()
        if before != unit.text():
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                fresh = self.path.with_name(f".{self.name}.new")
                fresh.write_text(unit.text())
                fresh.chmod(0o644)
                fresh.replace(self.path)
            except OSError as error:
                raise NotAllowed(f"{self.path} cannot be written: {error.strerror}", hint=_AS_ROOT) from error
        self._systemctl("daemon-reload")
        self._systemctl("enable", self.name)
        self._systemctl("restart" if before not in (None, unit.text()) else "start", self.name)
        return before != unit.text()

    def uninstall(self, home: Path) -> bool:
        """False when there was none."""
        if self._read() is None:
            return False
        self.expect_ours(home)
        self._systemctl("disable", "--now", self.name)
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise NotAllowed(f"{self.path} cannot be removed: {error.strerror}", hint=_AS_ROOT) from error
        self._systemctl("daemon-reload")
        return True

    def start(self) -> None:
        self._systemctl("start", self.name)

    def stop(self) -> None:
        self._systemctl("stop", self.name)

    def restart(self) -> None:
        self._systemctl("restart", self.name)

    def _systemctl(self, *words: str) -> str:
        argv = ["systemctl", *(() if self.is_system else ("--user",)), "--no-ask-password", *words]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LONGEST_S)
        except FileNotFoundError as error:
            raise NotFound("systemctl: no such program on this machine", hint=_NO_SYSTEMD) from error
        except subprocess.TimeoutExpired as error:
            raise UgroError(f"{' '.join(argv)} takes too long", hint=f"see: {self._journal}") from error
        if done.returncode != 0:
            said = " ".join(done.stderr.split())[:500] or f"exit code {done.returncode}"
            hint = f"see: {self._journal}" if words[0] in ("start", "restart") else _NO_SYSTEMD
            raise NotAllowed(f"systemctl {words[0]}: {said}", hint=hint)
        return done.stdout

    @property
    def _journal(self) -> str:
        return f"journalctl {'-u' if self.is_system else '--user -u'} {self.name}"

    def expect_ours(self, home: Path) -> None:
        """There is no unit of this name, or that of this state directory."""
        found = self._first_line()
        if found in (None, first_line(home)):
            return
        written, _, other = str(found).partition(_AGENT_OF)
        if written != first_line(home).partition(_AGENT_OF)[0]:
            raise NotAllowed(f"{self.path} was not written by UGRO", hint="move it away first")
        raise NotAllowed(
            f"{self.path} is the service of another state directory, {other}, not of {str(home)!r}",
            hint=f"remove that first: {self._uninstall(other)}; an agent without a service needs no unit",
        )

    def _uninstall(self, home: str) -> str:
        if not self.is_system:
            return f"UGRO_HOME={home} ugro agent uninstall"
        user = self.name.removeprefix("ugro-agent-").removesuffix(".service")
        return f"sudo UGRO_HOME={home} ugro agent uninstall --system --user {user}"

    def expect_startable(self, uid: int) -> None:
        """Asked before the agent is stopped to be started again."""
        if self.is_system and uid != 0:
            raise NotAllowed(
                f"the agent is {self.name}, which only root starts", hint=f"{self.command} restart {self.name}"
            )

    def _first_line(self) -> str | None:
        text = self._read()
        return None if text is None else text.partition("\n")[0]

    def _read(self) -> str | None:
        try:
            return self.path.read_text(errors="replace")
        except OSError:
            return None


_AGENT_OF = ": the agent of "  # in a unit's first line
_NO_SYSTEMD = "does systemd run here, and is this a login of the user's own? ugro agent install --print shows the unit"
_AS_ROOT = "a unit of the whole system is installed as root: sudo ugro agent install --system --user NAME"


def installed(home: StateDir) -> Service | None:
    """The service that runs the agent of this state directory, if there is one."""
    services = [Service.of_user(os.environ)]
    with suppress(OSError, KeyError):
        services.append(Service.of_system(pwd.getpwuid(home.path.stat().st_uid).pw_name))
    return next((one for one in services if one.is_for(home)), None)


def lingers(user: str) -> bool:
    """Whether what the user runs may go on without a login."""
    return (_LINGER / user).exists()
