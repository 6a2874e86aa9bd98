"""A team: several people on one master, one more on another machine, and three nodes with an account for each of them.

The people are accounts in lists of the test's own, which every process gets by a mount of its own. The other machine
is a network namespace, from which only the master's sshd is reached.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import ugro
from tests.rig import accounts, netns
from tests.rig.accounts import AccountsFarm, AccountsNode
from tests.rig.netns import Cable
from tests.rig.sshd import Farm, NodeOptions
from tests.rig.stores import use_engine
from tests.rig.waiting import end_all_with_variable, wait_until
from ugro.lab.nodes import SimulatedGpu, build_nvml_stub, write_gpus

HERE = ("ann", "bob", "cho")  # who use the master itself
AWAY = "dan"  # who works on another machine
PEOPLE = (*HERE, AWAY)
GROUP = "gpu"
_UGRO = Path(sys.executable).with_name("ugro")
_CALL_S = 180
_ANYBODY = 41_900  # a uid that nobody has


def available() -> str | None:
    reason = accounts.available() or netns.available()
    return reason or (None if _python() else "there is no Python here that other accounts can run")


@cache
def _python() -> str | None:
    """This Python, or Debian's of the same version: one in root's home is nobody else's."""
    candidates = (sys.executable, "/usr/bin/python{}.{}".format(*sys.version_info))
    return next((one for one in candidates if _runs_for_others(one)), None)


def _runs_for_others(python: str) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(_ANYBODY)
            os.setuid(_ANYBODY)
            os.execve(python, [python, "-S", "-c", "import ssl, sqlite3"], {})
        except OSError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _write_program(folder: Path) -> Path:
    """``ugro`` for everybody; returns where it is."""
    program = folder / "bin" / "ugro"
    program.parent.mkdir()
    paths = f"{Path(ugro.__file__).parents[1]}:{sysconfig.get_path('purelib')}"
    run = "import sys; from ugro.cli.entry import main; sys.exit(main())"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={paths} exec {_python()} -c '{run}' \"$@\"\n")
    program.chmod(0o755)
    return program.parent


class Master(AccountsNode):
    """The master's sshd, at our end of the cable to the other machine."""

    def __init__(self, name: str, number: int, directory: Path, options: NodeOptions) -> None:
        super().__init__(name, number, directory, options)
        self.cable = Cable()
        self.team_socket = self.programs = Path()

    def session_lines(self) -> list[str]:
        return [f'SetEnv "PATH={self.programs}:{self.options.path}" "UGRO_SOCKET={self.team_socket}"']

    def groups(self) -> list[str]:
        return [*super().groups(), f"{GROUP}:x:41999:{','.join(self.accounts)}"]

    def release(self) -> None:
        super().release()
        self.cable.remove()

    def _claim_address(self) -> tuple[str, int]:
        if self._reservation is None:
            self.cable.lay()
            self._reservation = socket.socket()
            self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reservation.bind((f"10.213.{self.cable.network}.1", 0))
        host, port = self._reservation.getsockname()
        return str(host), int(port)


class MasterFarm(Farm[Master]):
    node_type = Master


class Team:
    def __init__(self, folder: Path, nodes: AccountsFarm, door: MasterFarm) -> None:
        self.folder = folder
        self.nodes = nodes
        self.master = door.nodes[0]
        self._door = door
        self.home = folder / "agent"
        self.ledger = folder / "ledger"
        self.cluster = folder / "cluster.yaml"

    def write_cluster(self, **more: Any) -> None:
        gpus = build_nvml_stub(self.folder)
        entries = {}
        for number, node in enumerate(self.nodes.nodes):
            file = self.folder / f"gpus-{node.name}"
            write_gpus(file, [SimulatedGpu(uuid=f"GPU-{node.name}-{number}")])
            env = {"UGRO_NVML_LIBRARY": str(gpus), "UGRO_PRETEND_GPUS": str(file)}
            entries[node.name] = {"remote_root": "~/grid_workspace", "env": env}
        team = {"group": GROUP, "socket": str(self.master.team_socket), "account": "{user}", **more.pop("team", {})}
        cluster = {"ssh": {"config_file": str(self.nodes.ssh_config)}, "nodes": entries, "team": team, **more}
        self.cluster.write_text(yaml.safe_dump(cluster, sort_keys=False))

    def owner(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The agent's owner, root, on the master."""
        env = {"UGRO_HOME": str(self.home), "HOME": str(self.home), "UGRO_CLUSTER": str(self.cluster)}
        return self._run(self.master.placed("root", str(_UGRO), *words), env, self.home)

    def __call__(self, person: str, *words: str) -> subprocess.CompletedProcess[str]:
        """``ugro`` as somebody uses it: on the master, or on the other machine."""
        return self._run(*self._as(person, words))

    @contextmanager
    def following(self, person: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        argv, env, cwd = self._as(person, words)
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, env=_whole(env), cwd=cwd, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def project(self, person: str) -> Path:
        """Their own folder, which nobody else can read."""
        return (self.folder / "laptop" if person == AWAY else self.master.home_of(person)) / "project"

    def submit(self, person: str, *words: str) -> int:
        done = self(person, "run", "--json", "--detach", *words)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["job"]["id"])

    def job(self, number: int) -> dict[str, Any]:
        return dict(json.loads(self.owner("status", str(number), "--json").stdout)["job"])

    def until(self, number: int, *states: str) -> dict[str, Any]:
        wait_until(lambda: self.job(number)["state"] in states, 120, f"job {number} to be {states}: {self.job(number)}")
        return self.job(number)

    def lines(self) -> list[list[str]]:
        file = self.ledger / "lines"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, line: str) -> None:
        """That a job has written it down."""
        begin = line.split()
        wait_until(lambda: any(one[:2] == begin for one in self.lines()), 60, f"{line!r} in {self.lines()}")

    def go(self, gate: str) -> None:
        (self.ledger / f"{gate}.go").touch()

    def _as(self, person: str, words: Sequence[str]) -> tuple[list[str], dict[str, str], Path]:
        program, cwd = str(self.master.programs / "ugro"), self.project(person)
        if person != AWAY:
            home = self.master.home_of(person)
            return (
                self.master.placed(person, program, *words),
                {"HOME": str(home), "UGRO_SOCKET": str(self.master.team_socket)},
                cwd,
            )
        # Not as the account on the master: who he is, ssh says.
        there = ["ip", "netns", "exec", self.master.cable.namespace]
        env = {"HOME": str(cwd.parent), "UGRO_MASTER_SSH_CONFIG": str(self._door.ssh_config)}
        return [*there, program, "--master", f"{AWAY}@{self.master.name}", *words], env, cwd

    def _run(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, env=_whole(env), cwd=cwd, capture_output=True, text=True, timeout=_CALL_S)


def _whole(env: Mapping[str, str]) -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "PYTHONPATH", "PYTHONWARNINGS") if key in os.environ}
    return {**kept, **env}


@contextmanager
def team(folder: Path, **cluster: Any) -> Iterator[Team]:
    """Its agent keeps its state in the engine of the test."""
    folder.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        nodes = stack.enter_context(AccountsFarm(folder / "nodes", [PEOPLE] * 3))
        door = MasterFarm(folder / "door", 1)
        master = door.nodes[0]
        master.directory.mkdir(parents=True)
        master.give(*PEOPLE)
        master.team_socket, master.programs = folder / "team" / "agent.sock", _write_program(folder)
        stack.enter_context(door)
        made = Team(folder, nodes, door)
        _make_places(made)
        use_engine(made.home)
        made.write_cluster(**cluster)
        stack.callback(end_all_with_variable, "UGRO_HOME", [str(made.home)])
        stack.callback(end_all_with_variable, "HOME", [str(made.project(AWAY).parent)])
        started = made.owner("agent", "start")
        assert started.returncode == 0, started.stderr
        stack.callback(made.owner, "agent", "stop")
        wait_until(master.team_socket.exists, 30, "the team's socket")
        yield made


def _make_places(made: Team) -> None:
    made.home.mkdir(mode=0o700)
    made.ledger.mkdir()
    made.ledger.chmod(0o1777)
    for person in PEOPLE:
        made.project(person).mkdir(mode=0o700, parents=True)
        if person != AWAY:
            uid = made.master.uid_of(person)
            made.master.home_of(person).chmod(0o700)
            os.chown(made.project(person), uid, uid)
