"""Real OpenSSH servers as unequal nodes on one machine, each with its own address, key, home and state.

``with SshdFarm(directory, count=3) as farm`` starts them and ends all they ran. Nothing of UGRO is used.
Run ``python -m tests.rig.sshd --count 10 --dir DIR`` to have them for trying things by hand.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import yaml

from tests.rig.waiting import (
    descendants,
    end_all_with_variable,
    name_of,
    processes_with_variable,
    signal_all,
    stop_trees,
    wait_until,
    wait_until_dead,
)

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"

SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
_PYTHON_NAMES = re.compile(r"(python|pypy|pydoc|uv|uvx|conda|mamba|micromamba)[\d.]*(-.*)?$|python")
_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")
# What each shell reads before a command that sshd gives it; dash and sh read nothing.
_RC_FILES = {"bash": ".bashrc", "tcsh": ".tcshrc", "fish": ".config/fish/config.fish", "zsh": ".zshenv"}
_START_TIMEOUT_S = 20
_END_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a node differs from a plain one."""

    shell: str = "/bin/bash"
    banner: str = ""  # printed by the shell's rc file, to stdout and to stderr, before every command
    path: str = DEFAULT_PATH
    python: bool = True  # False: PATH holds the usual commands and no Python at all
    python_path: Path | None = None  # a directory with the only Python that is to be found on PATH
    home_mode: int = 0o755
    max_startups: str = "1000"
    # False: no wrapper around sessions, which then take a real node's time; the shell is the account's.
    wrapped: bool = True
    variables: tuple[tuple[str, str], ...] = ()  # more of them for every command
    sshd_lines: tuple[str, ...] = ()  # put first into sshd_config, where the first value wins


class SshdNode:
    """One sshd, and what runs in its sessions."""

    def __init__(self, name: str, number: int, directory: Path, options: NodeOptions) -> None:
        self.name = name
        self.number = number
        self.directory = directory
        self.home = directory / "home"
        self.host = ""
        self.port = 0
        self.options = options
        self._client_key = ""
        self._reservation: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The listening sshd's; None while it is stopped."""
        return self._server.pid if self._server is not None and self._server.poll() is None else None

    @property
    def log(self) -> str:
        file = self.directory / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def public_key(self) -> str:
        kind, key = (self.directory / "host_key.pub").read_text().split()[:2]
        return f"{kind} {key}"

    @property
    def homes(self) -> list[Path]:
        return [self.home]

    def session_lines(self) -> list[str]:
        if not self.options.wrapped:
            return [f'SetEnv "HOME={self.home}" "PATH={_path_of(self)}"']
        # The account's own shell only starts the wrapper: a bash that thinks itself nested reads no .bashrc.
        return ["SetEnv SHLVL=2", f"ForceCommand {shlex.quote(str(self.directory / 'session'))}"]

    def start(self) -> None:
        self.launch()
        self.wait_until_ready()

    def stop(self) -> None:
        """Ends the server and its sessions. What left its session lives on, as it would on a real node."""
        end_servers([self])

    def power_off(self) -> None:
        """Ends everything that runs on the node, at once."""
        end_servers([self])
        end_all_with_variable("HOME", list(map(str, self.homes)))

    def freeze(self) -> None:
        """The server and its sessions hang: connections stand and still open, and nothing is answered."""
        if self.pid is not None:
            stop_trees([self.pid])

    def thaw(self) -> None:
        if self.pid is not None:
            signal_all(signal.SIGCONT, [self.pid, *self.sessions()])

    def sessions(self) -> list[int]:
        """The sessions' sshds and what runs below them, parents first."""
        return descendants([self.pid]) if self.pid is not None else []

    def processes(self) -> list[int]:
        """Everything that runs on the node apart from the server: also what left its session."""
        return sorted({*self.sessions(), *processes_with_variable("HOME", list(map(str, self.homes)))})

    def kill_sessions(self, *, commands: bool = True) -> None:
        """Kills all sessions; with ``commands=False`` only sshd's part: commands see their pipes close."""
        doomed = [pid for pid in self.sessions() if commands or name_of(pid).startswith("sshd")]
        signal_all(signal.SIGKILL, doomed)
        wait_until_dead(doomed)

    def change_host_key(self) -> None:
        """As a machine that was installed anew: another host key, and no session survives."""
        was_running = self.pid is not None
        self.stop()
        make_keys([self.directory / "host_key"])
        if was_running:
            self.start()

    def refuse_keys(self) -> None:
        (self.directory / "authorized_keys").write_text("")

    def accept_keys(self) -> None:
        (self.directory / "authorized_keys").write_text(self._client_key)

    def configure(self, **changes: Any) -> None:
        """Changes options; they hold from the next session on, those of sshd itself from the next start."""
        self.options = replace(self.options, **changes)
        self._write_files()

    def prepare(self, client_key: str) -> None:
        """Everything but the host key and the process."""
        self._client_key = client_key
        self.home.mkdir(parents=True, exist_ok=True)
        self.accept_keys()
        self.host, self.port = self._claim_address()
        self._write_files()

    def launch(self) -> None:
        """Starts sshd without waiting for it."""
        (self.directory / "pid").unlink(missing_ok=True)
        files = ["-f", str(self.directory / "sshd_config"), "-E", str(self.directory / "log")]
        self._server = subprocess.Popen(
            [*self._launch_prefix(), command("sshd"), "-D", *files],
            env={"PATH": SYSTEM_PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for us to act on
        )

    def wait_until_ready(self) -> None:
        # sshd writes its pid when it listens. Knocking at the port would cost a fork for each look.
        def listens_or_died() -> bool:
            return (self.directory / "pid").exists() or self.pid is None

        wait_until(listens_or_died, _START_TIMEOUT_S, f"the sshd of {self.name} to listen")
        if self.pid is None:
            raise RuntimeError(f"the sshd of {self.name} did not start; its log: {self.log.strip()!r}")

    def kill_server(self) -> None:
        """The listening process alone; ``stop`` is for everybody else."""
        if self._server is not None:
            self._server.kill()
            self._server.wait(_END_TIMEOUT_S)

    def release(self) -> None:
        """Gives the address back, and makes the home removable."""
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
        if self.home.exists():
            self.home.chmod(0o755)

    def _claim_address(self) -> tuple[str, int]:
        if self._reservation is None:
            # Kept for life, bound and never listening, so that nobody gets the port while sshd is stopped;
            # sshd may bind it besides, because both sides set SO_REUSEADDR.
            self._reservation = socket.socket()
            self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reservation.bind((str(ipaddress.ip_address("127.0.1.0") + self.number), 0))
        host, port = self._reservation.getsockname()
        return str(host), int(port)

    def _launch_prefix(self) -> Sequence[str]:
        return ()

    def _write_files(self) -> None:
        self.home.chmod(0o755)
        _write_rc_files(self)
        _write_executable(self.directory / "session", _session_script(self))
        (self.directory / "sshd_config").write_text(_sshd_config(self))
        self.home.chmod(self.options.home_mode)


NodeT = TypeVar("NodeT", bound=SshdNode)


class Farm(Generic[NodeT]):
    """Some nodes, one client key that opens them all, and the configuration files to reach them with."""

    node_type: type[NodeT]

    def __init__(self, directory: Path, count: int = 10, **defaults: Any) -> None:
        self.directory = directory.absolute()
        self.user = user_name()
        self.client_key = self.directory / "client_key"
        self.known_hosts = self.directory / "known_hosts"
        self.ssh_config = self.directory / "ssh_config"
        options = NodeOptions(**defaults)
        self.nodes = [
            self.node_type(name, number, self.directory / name, options)
            for number, name in ((number, f"n{number:03}") for number in range(1, count + 1))
        ]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> NodeT:
        return next(node for node in self.nodes if node.name == name)

    def close(self) -> None:
        """Ends all servers, their sessions, and what left a session."""
        try:
            end_servers(self.nodes)
            end_all_with_variable("HOME", [str(home) for node in self.nodes for home in node.homes])
        finally:
            for node in self.nodes:
                node.release()

    def trust(self, nodes: Iterable[SshdNode]) -> None:
        """Makes ``known_hosts`` hold the present keys of these nodes and no others."""
        lines = (f"{_known_host(node)} {node.public_key}\n" for node in nodes)
        self.known_hosts.write_text("".join(lines))

    def ssh_argv(self, node: SshdNode, *command: str) -> list[str]:
        return ["ssh", "-F", str(self.ssh_config), "-o", "BatchMode=yes", node.name, *command]

    def cluster_yaml(self, **extra: Any) -> Path:
        """A cluster file with all nodes; ``extra`` adds keys to it and, in ``nodes``, to single nodes."""
        of_nodes: dict[str, dict[str, Any]] = extra.pop("nodes", {})
        nodes = {
            node.name: {"remote_root": str(node.home / "grid_workspace"), **of_nodes.get(node.name, {})}
            for node in self.nodes
        }
        file = self.directory / "cluster.yaml"
        cluster = {"ssh": {"config_file": str(self.ssh_config)}, "nodes": nodes, **extra}
        file.write_text(yaml.safe_dump(cluster, sort_keys=False))
        return file

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for node in self.nodes:
            node.directory.mkdir(exist_ok=True)
        make_keys([self.client_key, *(node.directory / "host_key" for node in self.nodes)])
        client_key = self.client_key.with_suffix(".pub").read_text()
        for node in self.nodes:
            node.prepare(client_key)
            node.launch()
        self.trust(self.nodes)
        self.ssh_config.write_text(_ssh_config(self))
        for node in self.nodes:
            node.wait_until_ready()


class SshdFarm(Farm[SshdNode]):
    """Nodes on loopback addresses, each with its own free port."""

    node_type = SshdNode


def user_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def make_keys(files: Sequence[Path]) -> None:
    """An Ed25519 pair for each, in place of one that is there."""

    def make(file: Path) -> None:
        file.unlink(missing_ok=True)
        argv = [command("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", file.name, "-f", str(file)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=_START_TIMEOUT_S)

    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(make, files))


def end_servers(nodes: Sequence[SshdNode]) -> None:
    roots = [node.pid for node in nodes if node.pid is not None]
    # Stopped first: once the server is gone, its sessions can no longer be told from other processes.
    doomed = [pid for pid in stop_trees(roots) if pid not in roots]
    signal_all(signal.SIGKILL, doomed)
    for node in nodes:
        node.kill_server()
    wait_until_dead(doomed)


def command(name: str) -> str:
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        raise RuntimeError(f"{name} is not installed; it comes with OpenSSH's server and client packages")
    return found


def _known_host(node: SshdNode) -> str:
    return node.host if node.port == 22 else f"[{node.host}]:{node.port}"


def _ssh_config(farm: Farm[NodeT]) -> str:
    shared = (
        f"User {farm.user}",
        f'IdentityFile "{farm.client_key}"',
        f'UserKnownHostsFile "{farm.known_hosts}"',
        "GlobalKnownHostsFile /dev/null",
        "IdentitiesOnly yes",
    )
    blocks = (
        "\n  ".join([f"Host {node.name}", f"HostName {node.host}", f"Port {node.port}", *shared])
        for node in farm.nodes
    )
    return "\n".join(blocks) + "\n"


def _sshd_config(node: SshdNode) -> str:
    lines = [
        *node.options.sshd_lines,
        f"ListenAddress {node.host}:{node.port}",
        f'HostKey "{node.directory / "host_key"}"',
        f'PidFile "{node.directory / "pid"}"',
        f'AuthorizedKeysFile "{node.directory / "authorized_keys"}"',
        f"MaxStartups {node.options.max_startups}",
        "LogLevel ERROR",
        "PermitRootLogin yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "StrictModes no",
        "UsePAM no",
        "PermitUserRC no",
        "PrintMotd no",
        *node.session_lines(),
    ]
    sftp = next((file for file in _SFTP_SERVERS if Path(file).exists()), None)
    lines += [f"Subsystem sftp {sftp}"] if sftp else []
    # Newer servers lock an address out after failed logins; here all clients and all failures share one.
    lines += ["PerSourcePenalties no"] if _openssh_version() >= (9, 8) else []
    return "\n".join(lines) + "\n"


@cache
def _openssh_version() -> tuple[int, int]:
    argv = [command("ssh"), "-V"]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=True).stderr
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _session_script(node: SshdNode) -> str:
    """Gives a command what sshd would give it on a machine where the account had this home and this shell."""
    shell = shlex.quote(node.options.shell)
    user = user_name()
    variables = {"USER": user, "LOGNAME": user, "HOME": str(node.home), "SHELL": node.options.shell}
    given_all = {**variables, "PATH": _path_of(node), **dict(node.options.variables)}
    words = [f"{key}={value}" for key, value in given_all.items()]
    passed_on = ("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TERM")
    given = " ".join(f'${{{key}+"{key}=${key}"}}' for key in passed_on)
    return "\n".join(
        [
            "#!/bin/sh",
            f"cd {shlex.quote(str(node.home))} || cd /",
            _banner_line(node) if Path(node.options.shell).name not in _RC_FILES else "",
            'if [ -n "${SSH_ORIGINAL_COMMAND+set}" ]; then',
            f'  set -- "SSH_ORIGINAL_COMMAND=$SSH_ORIGINAL_COMMAND" {shell} -c "$SSH_ORIGINAL_COMMAND"',
            "else",
            f"  set -- {shell} -l",
            "fi",
            f'exec {_privileges(node)} /usr/bin/env -i {shlex.join(words)} {given} "$@"',
            "",
        ]
    )


def _privileges(node: SshdNode) -> str:
    # Root writes into any directory, whatever its mode, unless it has lost the capability to.
    if os.geteuid() != 0 or node.options.home_mode & 0o200:
        return ""
    return "setpriv --bounding-set=-dac_override,-dac_read_search --"


def _path_of(node: SshdNode) -> str:
    if node.options.python and node.options.python_path is None:
        return node.options.path
    bare = _directory_without_python(node.directory.parent / "without-python", node.options.path)
    return str(bare) if node.options.python_path is None else f"{node.options.python_path}:{bare}"


def _directory_without_python(directory: Path, path: str) -> Path:
    """Links to all commands of ``path`` except Pythons and what brings one along."""
    if not directory.exists():
        directory.mkdir()
        for folder in filter(os.path.isdir, path.split(":")):
            for command in os.scandir(folder):
                with suppress(FileExistsError):
                    if not _PYTHON_NAMES.match(command.name):
                        (directory / command.name).symlink_to(command.path)
    return directory


def _banner_line(node: SshdNode) -> str:
    return f"/bin/sh {shlex.quote(str(node.directory / 'banner.sh'))}" if node.options.banner else ""


def _write_rc_files(node: SshdNode) -> None:
    text = shlex.quote(str(node.directory / "banner"))
    (node.directory / "banner").write_text(node.options.banner)
    _write_executable(node.directory / "banner.sh", f"/bin/cat {text}\n/bin/cat {text} >&2\n")
    line = _banner_line(node)
    for shell, rc_file in _RC_FILES.items():
        file = node.home / rc_file
        if line and shell == Path(node.options.shell).name:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{line}\n")
        elif file.exists() and str(node.directory / "banner.sh") in file.read_text():
            file.unlink()


def _write_executable(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--shell", default="/bin/bash")
    parser.add_argument("--bare", action="store_true", help="no wrapper around sessions, to measure")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = {"shell": chosen.shell, "wrapped": not chosen.bare}
    with suppress(KeyboardInterrupt), SshdFarm(chosen.dir, chosen.count, **options) as farm:
        sys.stdout.write(
            f"{len(farm.nodes)} sshds run: {farm.nodes[0].name} to {farm.nodes[-1].name}\n"
            f"  ssh -F {farm.ssh_config} {farm.nodes[0].name}\n"
            f"  ugro --cluster {farm.cluster_yaml()} health\n"
            "Ctrl-C ends them and everything they run.\n"
        )
        sys.stdout.flush()
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
