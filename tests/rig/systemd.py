"""Stands in for systemd where none runs: ``systemctl`` and ``loginctl`` that record, and start a unit as it says.

A unit that is started runs with a socket for its notification, and counts as started when it has said READY=1, as
systemd itself does with ``Type=notify``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.rig.waiting import is_alive, wait_until

_READY_S = 60
_CALLS, _FAILING, _PIDS = "calls", "failing", "pids"


class FakeSystemd:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        program = self.bin / "systemctl"
        root = Path(__file__).resolve().parents[2]
        argv = shlex.join([sys.executable, "-m", "tests.rig.systemd", str(folder)])
        program.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {argv} "$@"\n')
        program.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def calls(self) -> list[list[str]]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / _CALLS).read_text().splitlines()]
        return []

    def fail_at(self, verb: str, text: str) -> None:
        (self.folder / _FAILING).write_text(f"{verb} {text}")

    def pids(self) -> list[int]:
        with suppress(FileNotFoundError):
            return [int(word) for word in (self.folder / _PIDS).read_text().split()]
        return []

    def stop_all(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main(folder: Path, words: list[str]) -> int:
    with (folder / _CALLS).open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    verb, *rest = [word for word in words if not word.startswith("--")]
    with suppress(FileNotFoundError):
        failing, _, text = (folder / _FAILING).read_text().partition(" ")
        if verb == failing:
            sys.stderr.write(f"{text}\n")
            return 1
    if verb == "restart" or "--now" in words:
        _end(folder)
    if verb in ("start", "restart") and not _running(folder):
        return _start(folder, _units(words) / rest[0])
    return 0


def _units(words: list[str]) -> Path:
    """Those of the whole system are where a test has laid a folder of its own."""
    if "--user" not in words:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or f"{os.environ['HOME']}/.config", "systemd/user")


def _running(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [pid for pid in map(int, (folder / _PIDS).read_text().split()) if is_alive(pid)]
    return []


def _end(folder: Path) -> None:
    """Only the main process, as with ``KillMode=process``."""
    for pid in _running(folder):
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not _running(folder), _READY_S, "the unit's process to end")


def _start(folder: Path, unit: Path) -> int:
    [line] = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(_READY_S)
        address = f"\0ugro-test-{os.getpid()}"
        listener.bind(address)
        process = subprocess.Popen(
            shlex.split(line.removeprefix("ExecStart=")),
            env={**os.environ, "NOTIFY_SOCKET": f"@{address[1:]}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with (folder / _PIDS).open("a") as pids:
            pids.write(f"{process.pid}\n")
        try:
            return 0 if listener.recv(4096) == b"READY=1" else 1
        except TimeoutError:
            return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
