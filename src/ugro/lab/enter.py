"""The transport of a lab node: ``python -m ugro.lab.enter --home DIR [options] COMMAND…`` becomes COMMAND on that node.

Options: ``--cgroup PATH`` joins a CPU quota; ``--speed S`` starts a throttle instead; ``--env NAME=VALUE`` and
``--path DIR`` (put first on PATH) as often as needed. It runs each time a link opens, so it imports little.
It creates nothing, and fails if the lab is down.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

# In the environment of every process of a node. The value is the node's home, which differs between labs.
MARK = "UGRO_LAB_NODE"
# Variables of the agent's user that another machine would not have.
_NOT_OF_THE_NODE = ("UGRO_HOME", "UGRO_CLUSTER")


class Entry:  # no dataclass, because importing dataclasses takes longer than everything else
    def __init__(self) -> None:
        self.home = ""
        self.cgroup = ""
        self.speed = 1.0
        self.env: dict[str, str] = {}
        self.paths: list[str] = []
        self.command: list[str] = []


def main(arguments: Sequence[str]) -> NoReturn:
    entry = parse(arguments)
    if not os.path.isfile(os.path.join(os.path.dirname(entry.home), "cluster.yaml")):
        _refuse(f"the lab of {entry.home} is down")
    try:
        os.chdir(entry.home)
        if entry.cgroup:
            _join(entry.cgroup)
        elif entry.speed < 1:
            _start_throttle(entry)
        os.execvpe(entry.command[0], entry.command, environment(entry, os.environ))
    except OSError as error:
        _refuse(f"{error.filename or entry.command[0]}: {error.strerror}")


def parse(arguments: Sequence[str]) -> Entry:
    entry = Entry()
    words = iter(arguments)
    for word in words:
        if not word.startswith("--"):
            entry.command = [word, *words]
            break
        _set(entry, word, next(words, ""))
    if not entry.home or not entry.command:
        _refuse("usage: python -m ugro.lab.enter --home DIR [--cgroup PATH | --speed S] COMMAND…")
    return entry


def environment(entry: Entry, ours: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in ours.items() if name not in _NOT_OF_THE_NODE}
    env.update(entry.env)
    env["HOME"] = env[MARK] = entry.home
    # PyTorch would create it in /tmp, where it outlives the node.
    env["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(entry.home, ".cache", "torchinductor")
    env["PATH"] = os.pathsep.join([*entry.paths, ours.get("PATH", os.defpath)])
    return env


def _set(entry: Entry, option: str, value: str) -> None:
    if option == "--home":
        entry.home = value
    elif option == "--cgroup":
        entry.cgroup = value
    elif option == "--speed":
        entry.speed = float(value)
    elif option == "--env":
        name, _, text = value.partition("=")
        entry.env[name] = text
    elif option == "--path":
        entry.paths.append(value)
    else:
        _refuse(f"no option {option}")


def _join(cgroup: str) -> None:
    descriptor = os.open(os.path.join(cgroup, "cgroup.procs"), os.O_WRONLY)
    os.write(descriptor, str(os.getpid()).encode())
    os.close(descriptor)


def _start_throttle(entry: Entry) -> None:
    """Starts the throttle beside this process, which becomes the node program. It keeps no file of the link open."""
    argv = [sys.executable, "-m", "ugro.lab.throttle", entry.home, str(entry.speed), str(os.getpid())]
    # With our own environment: with the node's home, Python might not find its packages.
    env = {**os.environ, MARK: entry.home}
    if os.fork() == 0:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            os.execve(sys.executable, argv, env)
        finally:
            os._exit(1)


def _refuse(why: str) -> NoReturn:
    os.write(2, f"{why}\n".encode("utf-8", "replace"))
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
